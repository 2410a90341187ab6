"""For all tests: the machine may be busy, so no example of Hypothesis has to be quick."""

from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")
