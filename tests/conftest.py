"""For all tests: the machine may be busy, so no example of Hypothesis has to be quick; without a GPU Triton's kernels
are interpreted; and gRPC's core prints nothing of its own among the results."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")

# Before anybody imports Triton, whose own functions are made for one way of running when it is imported. Asking torch
# whether there is a GPU would cost each small test run its import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As runtime/quiet_grpc.py, and before anybody imports grpc.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
