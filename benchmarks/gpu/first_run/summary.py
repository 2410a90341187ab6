"""Prints the figures of a first run: a table of each part's rows, and the targets beside them.

python -m benchmarks.gpu.first_run.summary FOLDER
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import table_of

Row = Mapping[str, Any]

_FP8 = "Llama-3.1-8B fp8 kv8"
# Name, what is asked, the part, and which of its rows have the figure.
_TARGETS: tuple[tuple[str, str, str, str, Callable[[Row], bool], Callable[[float], bool]], ...] = (
    (
        "decode of 1 x 512, tokens/s",
        "250 or more",
        "models_fp8",
        "tokens_per_s",
        lambda row: row["case"] == f"{_FP8}, decode, 1 x 512",
        lambda found: found >= 250,
    ),
    (
        "decode of 256 x 512, tokens/s",
        "24,000 or more",
        "models_fp8",
        "tokens_per_s",
        lambda row: row["case"] == f"{_FP8}, decode, 256 x 512",
        lambda found: found >= 24_000,
    ),
    (
        "e4m3 decode of 64 x 4096, share of a copy",
        "0.6 or more",
        "compare",
        "share_of_copy",
        lambda row: row["op"] == "e4m3_decode" and row["case"] == "64 x 4096" and row["way"] == "now, own tile",
        lambda found: found >= 0.6,
    ),
    (
        "mixed step of 600 tokens, ms",
        "12 or less",
        "models_fp8",
        "ms",
        lambda row: row["case"] == f"{_FP8}, mixed step of 600" and row["way"].startswith("graphs"),
        lambda found: found <= 12,
    ),
)


def main() -> int:
    folder = Path(sys.argv[1])
    rows = {file.stem: json.loads(file.read_text())["rows"] for file in sorted(folder.glob("*.json"))}
    for part, found in rows.items():
        print(f"\n== {part}\n{table_of(found)}")
    print(f"\n== targets\n{targets(rows)}")
    return 0


def targets(rows: Mapping[str, Sequence[Row]]) -> str:
    """A line for each target; rows: by part."""
    lines: list[str] = []
    for name, asked, part, figure, is_meant, is_met in _TARGETS:
        found = [row[figure] for row in rows.get(part, ()) if row.get(figure) is not None and is_meant(row)]
        got = f"{found[0]:.4g}" if found else ""
        verdict = "not measured" if not found else "met" if is_met(found[0]) else "missed"
        lines.append(f"{name:<44}{asked:<18}{got:<12}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
