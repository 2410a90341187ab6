"""What stops a plan."""

from configs.load import ConfigError


class PlanError(ConfigError):
    """Input that nothing can be planned from; the message names it, the value seen and what would work."""


class DoesNotFit(PlanError):
    """A setting that this hardware cannot hold; the message says by how much, and what would."""
