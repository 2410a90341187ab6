"""The errors that end a tuning run."""

from configs.load import ConfigError


class TuningError(ConfigError):
    """Input that can't be tuned with, or a run in which nothing worked; the message says what would."""
