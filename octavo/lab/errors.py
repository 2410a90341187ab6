"""The errors that stop a plan, a tuning run or a sweep."""

from configs.load import ConfigError


class PlanError(ConfigError):
    """Input that cannot be planned with; the message names it, the value seen and what would work."""


class DoesNotFit(PlanError):
    """A setting that does not fit on this hardware; the message says by how much, and what would fit."""


class TuningError(ConfigError):
    """Input that can't be tuned or measured with, or a run in which nothing worked; the message says what would."""
