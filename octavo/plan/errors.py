"""The errors that stop a plan."""

from configs.load import ConfigError


class PlanError(ConfigError):
    """Input that cannot be planned with; the message names it, the value seen and what would work."""


class DoesNotFit(PlanError):
    """A setting that does not fit on this hardware; the message says by how much, and what would fit."""
