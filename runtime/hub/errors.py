"""Errors of downloads from the hub.

HubError
└── UnreachableError
"""


class HubError(ValueError):
    """The model could not be downloaded; the message says what would work."""


class UnreachableError(HubError):
    """The hub did not answer, or HF_HUB_OFFLINE is set. An earlier download may be complete."""
