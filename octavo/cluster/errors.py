"""The errors that keep a cluster from starting, or stop it."""


class ClusterError(Exception):
    """The cluster cannot start as configured; the message names the option and what would work."""


class ProcessFailed(ClusterError):
    """A process of the cluster ended and is not restarted; the message has its last lines."""
