"""Figures of several engines side by side: Octavo, the best peer, and the GEMM floor."""

import statistics
from dataclasses import asdict, dataclass, field

from benchmarks.engine_load import Figure, Sizes
from benchmarks.gemm_floor import GemmFloor
from benchmarks.peers.engines import OCTAVO
from worker.weights.quantization import Quantization

UNITS = {"throughput": "output_tok_s", "prefill": "tok_s", "shared_prefix": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. ratio: how many times as fast as the best peer; None where there is none. share: of the
    GEMM floor. drift: Octavo's second turn over its first."""

    quantization: Quantization
    kind: str
    concurrency: int
    unit: str
    octavo: float
    best_peer: str | None
    peer: float | None
    ratio: float | None
    share: float | None
    drift: float | None

    def as_json(self) -> dict[str, object]:
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {"figure": "comparison", "class": rounded.pop("quantization"), **rounded}

    def as_text(self) -> str:
        peer = f"{self.best_peer} {self.peer:.4g}, {self.ratio:.2f} times" if self.peer and self.ratio else "no peer"
        share = f", {self.share:.0%} of the GEMM floor" if self.share is not None else ""
        drift = f", drift {self.drift:.2f}" if self.drift is not None else ""
        what = f"{self.quantization} {self.kind} {self.concurrency}"
        return f"{what:<24} octavo {self.octavo:.4g} {self.unit}; {peer}{share}{drift}"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One class of precision."""

    quantization: Quantization
    floor: GemmFloor
    sizes: Sizes
    # By kind and concurrency, then by engine: the figures of its turns.
    _turns: dict[tuple[str, int], dict[str, list[Figure]]] = field(default_factory=dict)

    def add(self, engine: str, figure: Figure) -> None:
        self._turns.setdefault(figure.key, {}).setdefault(engine, []).append(figure)

    def floor_of(self, figure: Figure) -> float | None:
        """In the figure's unit."""
        if figure.kind == "throughput":
            return self.floor.output_rate(figure.concurrency, self.sizes.prompt, self.sizes.output)
        return self.floor.prompt_rate if figure.kind == "prefill" else None

    def rows(self) -> list[Row]:
        return [self._row(turns) for turns in self._turns.values()]

    def _row(self, turns: dict[str, list[Figure]]) -> Row:
        medians = {name: _median(figures) for name, figures in turns.items()}
        ours = next(name for name in turns if name.startswith(f"{OCTAVO}:"))
        octavo, first = medians.pop(ours), turns[ours][0]
        smaller_is_better = first.kind == "shared_prefix"
        best = (min if smaller_is_better else max)(medians, key=medians.__getitem__, default=None)
        ratio = None
        if best is not None:
            ratio = medians[best] / octavo if smaller_is_better else octavo / medians[best]
        floor = self.floor_of(first)
        return Row(
            quantization=self.quantization,
            kind=first.kind,
            concurrency=first.concurrency,
            unit=UNITS[first.kind],
            octavo=octavo,
            best_peer=best,
            peer=None if best is None else medians[best],
            ratio=ratio,
            share=None if floor is None else octavo / floor,
            drift=None if len(turns[ours]) == 1 else turns[ours][-1].median / first.median,
        )


def _median(figures: list[Figure]) -> float:
    """Of the rounds of all turns."""
    return statistics.median(value for figure in figures for value in figure.values)
