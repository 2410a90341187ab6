"""The output of a tuning run: a line of JSON per batch size and file, or a table for people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.bench.tune.problem import Problem
from octavo.bench.tune.tuner import Best


def best_as_json(best: Best) -> dict[str, Any]:
    shape = best.shape
    return {
        "op": shape.op,
        **shape.sizes,
        "M": best.M,
        "microseconds": round(best.microseconds, 3),
        "tflops": round(_tflops(best), 1),
        "tile": best.tile.as_json(),
        "num_tried": best.num_tried,
        "num_failed": best.num_failed,
    }


def title_of(shape: Problem) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.sizes.items() if isinstance(value, int))


def print_table(shape: Problem, bests: Sequence[Best], path: Path) -> None:
    # Fits into 80 columns.
    names = ("M", "us", "TFLOP/s", "tile", "warps", "stages", "group", "parts", "failed")
    table = Table(*names, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for best in sorted(bests, key=lambda best: best.M):
        tile = best.tile
        table.add_row(
            str(best.M),
            f"{best.microseconds:.1f}",
            f"{_tflops(best):,.0f}",
            f"{tile.block_m}x{tile.block_n}x{tile.block_k}",
            *map(str, (tile.num_warps, tile.num_stages, tile.group_m, tile.split_k)),
            f"{best.num_failed}/{best.num_tried}",
        )
    console = Console()
    console.print(title_of(shape), style="bold", highlight=False)
    console.print(table)
    console.print(str(path), style="dim", highlight=False, soft_wrap=True)


def _tflops(best: Best) -> float:
    return best.shape.flops(best.M) / best.microseconds / 1e6
