"""Flags that several benchmarks share."""

from typing import Annotated

import typer

PROMPT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each prompt, drawn at random.")]
OUTPUT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each output, exactly.")]
SEED = Annotated[int, typer.Option(min=0, help="Seed for prompts and arrival times.")]
JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line, for programs, and no progress bar.")
]


def counts(text: str, flag: str) -> list[int]:
    """Parses a list of numbers above 0. Raises typer.BadParameter."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers above 0, as in 1,8", param_hint=flag)
    return numbers
