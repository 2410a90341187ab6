"""Measures the cost of a step for the scheduler, and for a worker that takes in its plan, without any model.

    python -m benchmarks.scheduler.cost --json                  a line per size: {running, waiting, plan_us, encode_us,
                                                                apply_us, update_us, bytes}
    python -m benchmarks.scheduler.cost --vs-vllm [--vllm DIR]  compared with the vLLM scheduler, with the ratio
    python -m benchmarks.scheduler.cost --plot FILE.png         growth with the requests that change in a step
    python -m benchmarks.scheduler.cost --long                  one step of a request of 1,000 and of 1,000,000 tokens

Medians over the steps of a steady state, in microseconds. The machine should be idle otherwise: the longer a step, the
likelier other work interrupts it. plan: `Core.schedule`. encode: `StepCodec.encode`. apply: a worker parses the frame
and applies it to its rows. update: the scheduler parses and decodes a result and the core applies it. bytes: size of
the frame. All sequences decode; prompts have different lengths, so that in each step one in 16 fills a block, which is
named and published (prefix caching is on), and gets a new one.

vLLM: `Scheduler.schedule` and `update_from_output` of the environment that benchmarks/peers/install_vllm.sh makes, with
the same prompts, block size and prefix caching, and without statistics. Sizes take turns, in rounds.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import show
from benchmarks.peers.directory import peer_directory
from protos import inference_pb2, step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, StopRules
from scheduler.ranks.step_wire import GroupSampling, StepCodec
from worker.step.rows import Rows

BLOCK_SIZE, PROMPT_LEN, NUM_STEPS = 16, 128, 256
SIZES = [(64, 0), (256, 0), (1024, 0), (4096, 0), (256, 100_000), (4096, 100_000)]
PEER_SIZES = [64, 256, 1024]
EOS = 2
# Steps before the steady state: prefills, memory that is touched for the first time, a CPU that has just been idle.
_NUM_FIRST = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    running: int
    waiting: int
    # Sequences that end in each step; others take their places.
    changed: int = 0
    plan_us: float
    encode_us: float
    apply_us: float
    update_us: float
    bytes: int

    @property
    def scheduler_us(self) -> float:
        return self.plan_us + self.encode_us + self.update_us


class Bench:
    """A core whose rows are all taken. A worker applies its plans afterwards, as if in a process of its own."""

    def __init__(self, num_running: int, num_waiting: int, *, num_changes: int = 0, num_steps: int = NUM_STEPS) -> None:
        self._max_model_len = PROMPT_LEN + num_steps + 64
        self._num_running, self._num_changes = num_running, num_changes
        self._num_blocks = (num_running + num_changes) * (self._max_model_len // BLOCK_SIZE + 1)
        self._budget = num_running * PROMPT_LEN
        self.core = Core(
            CoreSettings(
                block_size=BLOCK_SIZE,
                num_blocks=self._num_blocks,
                max_model_len=self._max_model_len,
                max_num_seqs=num_running,
                max_num_batched_tokens=self._budget,
                eos_token_ids=frozenset({EOS}),
                max_queued_requests=num_running + num_waiting,
                max_queued_tokens=(num_running + num_waiting) * PROMPT_LEN,
            )
        )
        self._codec = StepCodec(epoch=1)
        self._max_tokens = num_steps + 32
        self._num_groups = 0
        self._choose = np.random.default_rng(0)
        # By row: the number of its sequence, and the output position of its next token.
        self._sequences = np.zeros(num_running, np.int64)
        self._positions = np.zeros(num_running, np.int32)
        self.frames: list[bytes] = []
        for _ in range(num_running + num_waiting):
            self.submit()

    def submit(self) -> None:
        self._num_groups += 1
        group = self._num_groups
        request = GroupRequest(
            group=group,
            request_id=str(group),
            prompt_token_ids=prompt_of(group, self._num_changes > 0),
            choices=(ChoiceStart(choice=0),),
            stop=StopRules(max_tokens=self._max_tokens),
            sampling=GroupSampling(
                inference_pb2.SamplingParams(temperature=1.0, seed=group), group=group, first_choice=0
            ),
        )
        rejection = self.core.submit(request, 0.0)
        assert rejection is None, rejection

    def step(self) -> tuple[float, float, float]:
        """Microseconds of plan, encode and update."""
        begin = time.perf_counter()
        plan = self.core.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        frame = self._codec.encode(plan)
        encoded = time.perf_counter()
        self.frames.append(frame)
        result = self._result(plan)
        started = time.perf_counter()
        outcome = self._codec.decode(step_pb2.StepResult.FromString(result))
        outputs = self.core.apply(outcome.result, 0.0)
        ended = time.perf_counter()
        assert len(outputs.groups) == self._num_running
        for _ in outputs.ends:
            self.submit()
        return 1e6 * (planned - begin), 1e6 * (encoded - planned), 1e6 * (ended - started)

    def _result(self, plan: Plan) -> bytes:
        """Makes a worker's result: every row samples a token, `num_changes` of them EOS."""
        for new in plan.new_rows:
            self._sequences[new.row], self._positions[new.row] = new.sequence, 0
        rows = np.array([row for row, _ in plan.batch], np.int64)
        token_ids = np.full(len(rows), 7, np.int32)
        token_ids[self._choose.choice(len(rows), self._num_changes, replace=False)] = EOS
        result = step_pb2.StepResult(
            epoch=1,
            step=plan.step,
            sequences=self._sequences[rows].astype("<i8").tobytes(),
            positions=self._positions[rows].astype("<i4").tobytes(),
            token_ids=token_ids.astype("<i4").tobytes(),
        )
        self._positions[rows] += 1
        return result.SerializeToString()

    def apply_all(self) -> list[float]:
        """Microseconds that a worker takes to parse and apply each frame."""
        rows, spans = self._make_rows(), []
        for frame in self.frames:
            begin = time.perf_counter()
            plan = step_pb2.SchedulerToWorker.FromString(frame).plan
            rows.apply(plan)
            scheduled = rows.schedule(plan)
            spans.append(1e6 * (time.perf_counter() - begin))
            rows.advance(scheduled.rows_S, scheduled.num_tokens_S)
            rows.append(scheduled.rows_S, np.full(len(scheduled.rows_S), 7))
        return spans

    def _make_rows(self) -> Rows:
        return Rows(
            max_num_seqs=self._num_running,
            max_num_batched_tokens=self._budget,
            max_model_len=self._max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
            vocab_size=32_000,
            eos_token_ids=frozenset({EOS}),
        )


def prompt_of(group: int, is_short: bool = False) -> tuple[int, ...]:
    """Makes a prompt. Lengths differ, so that blocks fill in different steps, as in real use. vLLM gets the same."""
    length = (32 if is_short else PROMPT_LEN) - group % BLOCK_SIZE
    return tuple((group * 31 + i) % 30_000 + 10 for i in range(length))


def wake_up() -> None:
    """Keeps the CPU busy for 0.5 s, since a core that was idle is slow at first. Both sides begin with this."""
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass


def measure(num_running: int, num_waiting: int, *, num_changes: int = 0, num_steps: int = NUM_STEPS) -> Cost:
    bench = Bench(num_running, num_waiting, num_changes=num_changes, num_steps=num_steps)
    wake_up()
    # As the step loop does once it is set up.
    gc.collect()
    gc.freeze()
    spans = [bench.step() for _ in range(_NUM_FIRST + num_steps)][_NUM_FIRST:]
    plan_us, encode_us, update_us = (round(statistics.median(column), 1) for column in zip(*spans, strict=True))
    return Cost(
        running=num_running,
        waiting=num_waiting,
        changed=num_changes,
        plan_us=plan_us,
        encode_us=encode_us,
        apply_us=round(statistics.median(bench.apply_all()[_NUM_FIRST:]), 1),
        update_us=update_us,
        bytes=int(statistics.median(map(len, bench.frames[_NUM_FIRST:]))),
    )


# --- Beside vLLM


def beside_vllm(directory: Path, rounds: int) -> list[dict[str, object]]:
    """A line per size: our plan + encode + update, their schedule + update_from_output, and the ratio theirs / ours."""
    python = directory / "bin" / "python"
    if not python.exists():
        sys.exit(f"no vLLM in {directory}: run benchmarks/peers/install_vllm.sh {directory}")
    ours: dict[int, list[Cost]] = {size: [] for size in PEER_SIZES}
    theirs: dict[int, list[dict[str, float]]] = {size: [] for size in PEER_SIZES}
    script = Path(__file__).resolve().parents[1] / "peers" / "runners" / "vllm_scheduler.py"
    with subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        for _ in range(rounds):
            for size in PEER_SIZES:
                ours[size].append(measure(size, 0))
                prompts = [list(prompt_of(group)) for group in range(1, size + 1)]
                peer.stdin.write(json.dumps({"prompts": prompts, "block_size": BLOCK_SIZE, "steps": NUM_STEPS}) + "\n")
                peer.stdin.flush()
                theirs[size].append(json.loads(peer.stdout.readline()))
        peer.stdin.close()
    lines = []
    for size in PEER_SIZES:
        cost = statistics.median(each.scheduler_us for each in ours[size])
        vllm_us = statistics.median(each["schedule_us"] + each["update_us"] for each in theirs[size])
        lines.append(
            {
                "running": size,
                "octavo_us": round(cost, 1),
                "vllm_us": round(vllm_us, 1),
                "ratio": round(vllm_us / cost, 1),
            }
        )
    return lines


# --- Long contexts


def long_contexts() -> dict[str, object]:
    """Plan, encode and update of one decode step at 1,000 and at 1,000,000 tokens of context, taken in turns."""
    benches = {length: _LongBench(length) for length in (1_000, 1_000_000)}
    spans: dict[int, list[float]] = {length: [] for length in benches}
    for _ in range(2 * NUM_STEPS):
        for length, bench in benches.items():
            spans[length].append(bench.step())
    short_us, long_us = (statistics.median(each) for each in spans.values())
    # One step in 16 fills a block, names it and takes another.
    short_filling_us, long_filling_us = (
        statistics.median(sorted(each)[-len(each) // BLOCK_SIZE :]) for each in spans.values()
    )
    return {
        "step_us_1000": round(short_us, 1),
        "step_us_1000000": round(long_us, 1),
        "ratio": round(long_us / short_us, 2),
        "ratio_where_a_block_fills": round(long_filling_us / short_filling_us, 2),
    }


class _LongBench:
    def __init__(self, length: int) -> None:
        most = length + 4 * NUM_STEPS
        self._core = Core(
            CoreSettings(
                block_size=BLOCK_SIZE,
                num_blocks=most // BLOCK_SIZE + 2,
                max_model_len=most,
                max_num_seqs=1,
                max_num_batched_tokens=length,
            )
        )
        self._codec = StepCodec(epoch=1)
        request = GroupRequest(
            group=1,
            request_id="1",
            prompt_token_ids=tuple(i % 30_000 for i in range(length)),
            choices=(ChoiceStart(choice=0),),
            stop=StopRules(max_tokens=3 * NUM_STEPS),
            sampling=GroupSampling(inference_pb2.SamplingParams(), group=1, first_choice=0),
        )
        assert self._core.submit(request, 0.0) is None
        self._position = 0
        self.step()

    def step(self) -> float:
        """Microseconds of plan, encode and update."""
        begin = time.perf_counter()
        plan = self._core.schedule(0.0)
        assert plan is not None
        self._codec.encode(plan)
        encoded = time.perf_counter()
        result = step_pb2.StepResult(
            epoch=1,
            step=plan.step,
            sequences=np.array([1], "<i8").tobytes(),
            positions=np.array([self._position], "<i4").tobytes(),
            token_ids=np.array([7], "<i4").tobytes(),
        )
        self._position += 1
        started = time.perf_counter()
        outputs = self._core.apply(self._codec.decode(result).result, 0.0)
        ended = time.perf_counter()
        assert len(outputs.token_ids) == 1
        return 1e6 * (encoded - begin + ended - started)


# --- The plot


def growth() -> list[Cost]:
    """Costs with 100,000 requests waiting, as more and more of the batch end in each step and are replaced."""
    costs = []
    for num_running in (256, 1024, 4096):
        for share in (0, 1 / 256, 1 / 64, 1 / 32, 1 / 16, 1 / 8):
            costs.append(measure(num_running, 100_000, num_changes=int(num_running * share), num_steps=40))
    return costs


def plot(costs: list[Cost], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for num_running in sorted({cost.running for cost in costs}):
        line = [cost for cost in costs if cost.running == num_running]
        changed, costs_us = [cost.changed for cost in line], [cost.scheduler_us for cost in line]
        axes.plot(changed, costs_us, marker="o", label=f"{num_running:,} running")
    axes.set(
        xscale="symlog",
        yscale="log",
        xlabel="requests that end in each step, others taking their places",
        ylabel="plan + encode + update, us",
        title="A step's cost, 100,000 requests waiting",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--vs-vllm", action="store_true", help="only the comparison with vLLM")
    parser.add_argument(
        "--vllm", type=Path, default=peer_directory("vllm"), help="vLLM's environment (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --vs-vllm")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="only the growth with changed requests")
    parser.add_argument("--long", action="store_true", help="only long contexts")
    arguments = parser.parse_args()

    if arguments.vs_vllm:
        for line in beside_vllm(arguments.vllm, arguments.rounds):
            show(line, as_json=arguments.json)
    elif arguments.plot:
        costs = growth()
        plot(costs, arguments.plot)
        for cost in costs:
            show(asdict(cost), as_json=arguments.json)
    elif arguments.long:
        show(long_contexts(), as_json=arguments.json)
    else:
        for num_running, num_waiting in SIZES:
            line = asdict(measure(num_running, num_waiting))
            del line["changed"]
            show(line, as_json=arguments.json)


if __name__ == "__main__":
    main()
