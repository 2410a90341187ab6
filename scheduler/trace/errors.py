"""What can be wrong with a trace."""


class TraceError(ValueError):
    """The file can't be written, or is no trace, or of another version, or damaged. The message names it and says what
    would help."""
