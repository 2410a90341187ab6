"""What can be wrong with a trace."""


class TraceError(Exception):
    """The file is no trace, or of another version, or damaged. The message names the file and says what would help."""
