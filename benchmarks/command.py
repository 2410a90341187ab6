"""Shared by the commands of benchmarks: lists in their flags, and rows of figures."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any


def numbers(text: str) -> list[int]:
    """Reads `1,8,64`."""
    return [int(each) for each in text.split(",")]


def names(*known: str) -> Callable[[str], list[str]]:
    """Returns a type of argparse: comma-separated names among the known ones."""

    def read(text: str) -> list[str]:
        found = [each for each in text.split(",") if each]
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: must be among {', '.join(known)}")
        return found

    return read


def rounded(row: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """Rounds the floats of a row."""
    return {name: round(value, digits) if isinstance(value, float) else value for name, value in row.items()}


def show(row: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints a row of figures as a line: of JSON, or for people."""
    print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
