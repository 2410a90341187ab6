"""What goes wrong with weight files."""


class WeightsError(ValueError):
    """A weight file is missing, damaged, or of another model. The message names the file and what is wrong with it."""


def some(names: list[str]) -> str:
    """The first few of `names`, for a message."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
