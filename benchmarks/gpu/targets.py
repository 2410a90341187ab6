"""Targets of the kernels and the engine on an H200, beside the results of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]

_MIN_KV_GB = 2.0
_M_OF_GEMM = 4096


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    asked: str
    got: str
    # None: not measured in this run.
    is_met: bool | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def targets(rows: Sequence[Row]) -> list[Target]:
    """Compares a Report's rows with the targets. A target is met if all rows that it is about meet it."""
    decodes = [row for row in _timed(rows, "paged_attention", "share_of_copy") if row["way"] == "ours"]
    decodes = [row for row in decodes if row["kv_gb"] >= _MIN_KV_GB]
    prefills = [row for row in _timed(rows, "paged_attention", "tflops") if row["way"] == "ours"]
    prefills = [row for row in prefills if row["case"] == "prefill, 1 x 16384"]
    gemms = [row for row in _timed(rows, "fp8_gemm", "tflops") if row["way"].startswith("block") and row["chosen"]]
    idle = [row for row in _timed(rows, "end_to_end", "idle_share") if row["way"] == "graphs, overlap"]
    return [
        _target(
            "decode, share of copy bandwidth, KV of 2 GB and more",
            "0.75 or more",
            decodes,
            "share_of_copy",
            lambda share: share >= 0.75,
        ),
        _target("prefill of 16k, TFLOP/s", "400 or more", prefills, "tflops", lambda tflops: tflops >= 400),
        _target(
            f"block FP8 GEMM at M {_M_OF_GEMM}, TFLOP/s",
            "900 or more",
            [row for row in gemms if _m_of(row) == _M_OF_GEMM],
            "tflops",
            lambda tflops: tflops >= 900,
        ),
        _ahead_of_bf16(gemms),
        _target(
            "graphs against eager, batch 1, Qwen3-0.6B",
            "2 times or more",
            list(_over_eager(rows)),
            "over_eager",
            lambda times: times >= 2,
        ),
        _target(
            "steady decode, share of time the GPU is idle", "under 0.05", idle, "idle_share", lambda share: share < 0.05
        ),
    ]


def table(found: Sequence[Target]) -> str:
    marks = {True: "met", False: "missed", None: "not measured"}
    lines = [f"{each.name:<56}{each.asked:<18}{each.got:<44}{marks[each.is_met]}" for each in found]
    return "\n".join([f"{'':<56}{'asked':<18}{'got':<44}", *lines])


def _timed(rows: Sequence[Row], op: str, figure: str) -> list[Row]:
    """Rows that have a value of the figure; none in toy mode, where it is NaN, or None in JSON."""
    rows = [row for row in rows if row["op"] == op and row.get(figure) is not None]
    return [row for row in rows if row[figure] == row[figure]]


def _target(name: str, asked: str, rows: Sequence[Row], figure: str, is_met: Callable[[float], bool]) -> Target:
    if not rows:
        return Target(name, asked, "", None)
    values = [row[figure] for row in rows]
    got = f"{min(values):.3g}" if len(rows) == 1 else f"{min(values):.3g} to {max(values):.3g} ({len(rows)} cases)"
    return Target(name, asked, got, all(map(is_met, values)))


def _m_of(row: Row) -> int:
    return int(row["case"].rpartition("M=")[2])


def _ahead_of_bf16(gemms: Sequence[Row]) -> Target:
    """The smallest measured M from which on every layer is faster than in bf16."""
    name, asked = "block FP8 GEMM ahead of bf16, from M", "16"
    if not gemms:
        return Target(name, asked, "", None)
    behind = [_m_of(row) for row in gemms if row["over_bf16"] <= 1]
    ahead = sorted({_m_of(row) for row in gemms if _m_of(row) > max(behind, default=0)})
    sizes = sorted({_m_of(row) for row in gemms})
    got = f"{ahead[0]}" if ahead else "none"
    return Target(name, asked, f"{got} (of {', '.join(map(str, sizes))})", bool(ahead) and ahead[0] <= 16)


def _over_eager(rows: Sequence[Row]) -> Iterator[Row]:
    """Steps of one row of the small model: eager against graphs, with the same number in flight."""
    decodes = [
        row
        for row in _timed(rows, "end_to_end", "ms")
        if row["case"].startswith("Qwen3-0.6B, decode, 1 x ") and "way" in row
    ]
    milliseconds = {row["way"]: row["ms"] for row in decodes}
    for suffix in (", overlap", ""):
        if {f"graphs{suffix}", f"eager{suffix}"} <= set(milliseconds):
            yield {"over_eager": milliseconds[f"eager{suffix}"] / milliseconds[f"graphs{suffix}"]}
