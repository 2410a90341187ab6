"""Why a cluster does not start, or stops."""


class ClusterError(Exception):
    """The cluster cannot start as configured; the message names the option and what would work."""


class ProcessFailed(ClusterError):
    """A process of the cluster ended for good; the message has its last words."""
