"""Compares Octavo's engine on a CPU with its peers, and with the floor that its linears alone would set, in one run.

    python -m benchmarks.engine.cpu_engine                                  Octavo alone, in bfloat16
    python -m benchmarks.engine.cpu_engine --quantization none,int8,int4    in three precisions
    python -m benchmarks.engine.cpu_engine --peers all                      the peers, one after the other
    python -m benchmarks.engine.cpu_engine --peers openvino,llama.cpp:F16   some of them, or one form of one of them
    python -m benchmarks.engine.cpu_engine --context 32768 --peers all --timeout 3600   a long prompt, and nothing else
    python -m benchmarks.engine.cpu_engine --peers all --smoke              that all of them run; the figures mean
    nothing
    --json: a line of JSON for each figure, instead of a table. --concurrency 1,8 --rounds 1: less.

SmolLM2-135M, greedy, random prompts that no round repeats, every engine in a process of its own and one at a time:
- throughput: output tokens/s of requests (128 tokens in, 128 out) that begin together, and its share of the GEMM floor:
  the rate if the same tokens, prompts included, took only the time of the fastest linears measured in this run;
- prefill: tokens/s of one prompt of 1,500 tokens, and its share of the floor;
- shared_prefix: seconds for 16 requests of 1,088 tokens that share 1,024, 32 out, and arrive together;
- with --context: first_token, the seconds to the first token of a prompt of so many, and decode, tokens/s after it.
Each line names the kernels that Octavo has for this CPU. Octavo is measured before and after its peers. Values are
medians of the rounds; peak memory is PSS. Classes are none (floats of 16 bits and more), int8 and int4; in each, a
peer's best form counts. Peers' settings are in benchmarks/peers/engines.py. Scripts of benchmarks/peers/ install them;
a peer that is not installed is named and left out. A class takes about 10 minutes with all peers, of which vLLM needs 2
to start.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.command import names, numbers, show
from benchmarks.engine.workload import LONG_OUTPUT, SMOKE_SIZES, Figure, Sizes, measure, measure_context
from benchmarks.kernels.gemm_floor import GemmFloor
from benchmarks.peers.engine_process import TIMEOUT, EngineFailedError, EngineProcess
from benchmarks.peers.engines import OCTAVO, PEERS, QUANTIZATIONS, EngineSpec, octavo_engine, peer_engines
from benchmarks.peers.prepare_models import prepare, prepare_context
from kernels.native.build import path_of_this_cpu
from worker.weights.quantization.kinds import Quantization

UNITS = {
    "throughput": "output_tok_s",
    "prefill": "tok_s",
    "shared_prefix": "seconds",
    "first_token": "seconds",
    "decode": "output_tok_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. ratio: how many times as fast as the best peer Octavo is; None without a peer. share:
    fraction of the GEMM floor. drift: Octavo's second turn over its first."""

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
    """The figures of all engines in one class of precision."""

    quantization: Quantization
    floor: GemmFloor
    sizes: Sizes
    # (kind, concurrency) -> engine -> the figures of its turns.
    _turns: dict[tuple[str, int], dict[str, list[Figure]]] = field(default_factory=dict)

    def add(self, engine: str, figure: Figure) -> None:
        self._turns.setdefault(figure.key, {}).setdefault(engine, []).append(figure)

    def floor_of(self, figure: Figure) -> float | None:
        """The floor in the figure's unit; None where there is none."""
        if figure.kind == "throughput":
            return self.floor.output_rate(figure.concurrency, self.sizes.prompt, self.sizes.output)
        return self.floor.prompt_rate if figure.kind == "prefill" else None

    def rows(self) -> list[Row]:
        return [self._row(turns) for turns in self._turns.values()]

    def _row(self, turns: dict[str, list[Figure]]) -> Row:
        medians = {name: _median(figures) for name, figures in turns.items()}
        ours = next(name for name in turns if name.startswith(f"{OCTAVO}:"))
        octavo, first = medians.pop(ours), turns[ours][0]
        smaller_is_better = UNITS[first.kind] == "seconds"
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
    """The median over the rounds of all turns."""
    return statistics.median(value for figure in figures for value in figure.values)


class Run:
    def __init__(self, arguments: argparse.Namespace, log: int) -> None:
        self._arguments, self._log = arguments, log
        path = path_of_this_cpu()
        self._cpu = "without AVX2" if path is None else path.name
        self._sizes: Sizes = SMOKE_SIZES if arguments.smoke else Sizes()
        self._concurrencies: list[int] = arguments.concurrency
        self._seed = 0

    def compare(self, quantization: Quantization) -> Comparison:
        """Measures one class of precision: Octavo, its peers, and Octavo again if there were any."""
        floor = GemmFloor(getattr(torch, self._arguments.dtype), quantization, self._concurrencies)
        comparison = Comparison(quantization=quantization, floor=floor, sizes=self._sizes)
        length = self._arguments.context
        context = (prepare_context(length + LONG_OUTPUT + 1), length + LONG_OUTPUT + 1) if length else None
        octavo = octavo_engine(quantization, self._arguments.dtype, self._arguments.threads, context=context)
        peers = list(self._peers(quantization))
        for spec in (octavo, *peers, *([octavo] if peers else [])):
            try:
                self._measure(spec, comparison)
            except EngineFailedError as error:
                if spec is octavo:
                    raise
                self._say(f"{quantization}: {error}")
        return comparison

    def _peers(self, quantization: Quantization) -> Iterator[EngineSpec]:
        for spec in peer_engines(quantization, self._arguments.threads, self._arguments.peers):
            if spec.to_install is None:
                yield spec
            else:
                self._say(f"{spec.name} is left out: it is not installed; run {spec.to_install}")

    def _measure(self, spec: EngineSpec, comparison: Comparison) -> None:
        self._seed += 1000
        with EngineProcess(spec, self._log, self._arguments.timeout) as engine:
            for figure in self._figures(engine):
                comparison.add(spec.name, figure)
                self._show(spec, figure, comparison)
            about = {"start_s": round(engine.start_seconds, 1), "peak_mib": engine.peak_mib, **engine.settings}
        if self._arguments.json:
            print(json.dumps({"figure": "engine", "class": comparison.quantization, "engine": spec.name, **about}))
        else:
            self._say(f"{spec.name}: {about}")

    def _figures(self, engine: EngineProcess) -> Iterator[Figure]:
        rounds, seed = self._arguments.rounds, self._seed
        if self._arguments.context:
            return measure_context(engine, self._arguments.context, rounds=rounds, seed=seed)
        seconds = self._arguments.seconds
        return measure(engine, self._sizes, self._concurrencies, rounds=rounds, seconds=seconds, seed=seed)

    def _show(self, spec: EngineSpec, figure: Figure, comparison: Comparison) -> None:
        shown = {
            "figure": figure.kind,
            "class": comparison.quantization,
            "engine": spec.name,
            "cpu": self._cpu,
            "concurrency": figure.concurrency,
            UNITS[figure.kind]: round(figure.median, 3),
            "values": [round(value, 3) for value in figure.values],
        }
        if (floor := comparison.floor_of(figure)) is not None:
            shown |= {"gemm_floor": round(floor, 1), "share": round(figure.median / floor, 3)}
        if figure.prompt_tokens_computed is not None:
            shown["prompt_tokens_computed"] = figure.prompt_tokens_computed
        show(shown, as_json=self._arguments.json)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr if self._arguments.json else sys.stdout, flush=True)


def _peers(text: str) -> list[str]:
    wanted = [*PEERS] if text == "all" else [each for each in text.split(",") if each]
    if unknown := [each for each in wanted if each.partition(":")[0] not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be all, or among {', '.join(PEERS)}")
    return wanted


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument(
        "--quantization", type=names(*QUANTIZATIONS), default=["none"], help="comma-separated: none, int8, int4"
    )
    parser.add_argument("--peers", type=_peers, default=[], help=f"all, or some of {', '.join(PEERS)}")
    parser.add_argument("--context", type=int, default=0, help="tokens of a long prompt; nothing else is measured then")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="Octavo's dtype")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every engine")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per median")
    parser.add_argument("--seconds", type=float, default=10, help="no round of a figure begins after this time")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for an engine's start or measurement")
    parser.add_argument("--smoke", action="store_true", help="short prompts and outputs")
    parser.add_argument("--log", default="/dev/null", help="file for the engines' output")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.peers:
        prepare()
    with open(arguments.log, "wb") as log:
        run = Run(arguments, log.fileno())
        for quantization in arguments.quantization:
            for row in run.compare(quantization).rows():
                print(json.dumps(row.as_json()) if arguments.json else row.as_text(), flush=True)


if __name__ == "__main__":
    main()
