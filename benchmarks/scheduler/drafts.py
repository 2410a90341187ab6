"""Measures what drafts cost the scheduler in a step, without any model.

    python -m benchmarks.scheduler.drafts --json      a line per method: {method, running, drafts, accepted, plan_us,
                                                      encode_us, update_us, scheduler_us}

Medians over the steps of a steady state, in microseconds, as in benchmarks/scheduler/cost.py. plan: `Core.schedule`
with the choice of drafts. encode: `StepCodec.encode`. update: parsing and decoding a result, and `Core.apply` with the
drafters. All sequences repeat a pattern of 40 tokens, so that drafters always propose; of 3 drafts a row, as many are
accepted as the line says. `off`: without speculative_config. `no drafts`: with it, where no draft pays. `workers`:
the workers have a drafter, and the core asks itself in each step what it should draft. About 10 s.
"""

import argparse
import gc
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.command import show
from benchmarks.scheduler.cost import wake_up
from protos import inference_pb2, step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, Speculation, StepCosts, StopRules
from scheduler.ranks.step_wire import GroupSampling, StepCodec

BLOCK_SIZE, NUM_DRAFTS, NUM_STEPS = 16, 3, 160
PATTERN, PROMPT_LEN = 40, 128
_NUM_FIRST = 20
# The core's drafters of each method. None: no speculation. Empty: the workers draft.
METHODS: dict[str, tuple[str, ...] | None] = {"off": None, "ngram": ("ngram",), "suffix": ("suffix",), "workers": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    method: str
    running: int
    # Drafts of each row in a step, and how many of them are accepted.
    drafts: int
    accepted: int
    plan_us: float
    encode_us: float
    update_us: float

    @property
    def scheduler_us(self) -> float:
        return round(self.plan_us + self.encode_us + self.update_us, 1)


class Bench:
    def __init__(self, num_running: int, drafters: tuple[str, ...] | None, *, accepted: int, pays: bool) -> None:
        self._num_running, self._accepted = num_running, accepted
        max_tokens = (_NUM_FIRST + NUM_STEPS + 2) * (NUM_DRAFTS + 1)
        max_model_len = PROMPT_LEN + max_tokens
        speculation = None
        if drafters is not None:
            speculation = Speculation(
                num_speculative_tokens=NUM_DRAFTS,
                drafters=drafters,
                workers_draft=not drafters,
                workers_catch_up=not drafters,
            )
        self.core = Core(
            CoreSettings(
                block_size=BLOCK_SIZE,
                num_blocks=num_running * (max_model_len // BLOCK_SIZE + 3),
                max_model_len=max_model_len,
                max_num_seqs=num_running,
                max_num_batched_tokens=num_running * PROMPT_LEN,
                speculation=speculation,
            )
        )
        # Without slope, drafts always pay.
        slope = 0.0 if pays else 10.0
        self.core.set_costs(StepCosts(num_tokens=(1, 1001), seconds=(1.0, 1.0 + 1000 * slope)))
        self._codec = StepCodec(epoch=1)
        self._sequences = np.zeros(num_running, np.int64)
        # By row: the output position of its next token, and where in the pattern it is.
        self._positions = np.zeros(num_running, np.int64)
        self._starts = np.zeros(num_running, np.int64)
        for group in range(1, num_running + 1):
            # Lengths differ, so that blocks fill in different steps.
            length = PROMPT_LEN - group % BLOCK_SIZE
            self.core.submit(
                GroupRequest(
                    group=group,
                    request_id=str(group),
                    prompt_token_ids=tuple(self._token(group, i) for i in range(length)),
                    choices=(ChoiceStart(choice=0),),
                    stop=StopRules(max_tokens=max_tokens, ignore_eos=True),
                    sampling=GroupSampling(inference_pb2.SamplingParams(), group=group, first_choice=0),
                ),
                0.0,
            )

    @staticmethod
    def _token(group: int, position: int) -> int:
        return group * 50 + position % PATTERN

    def step(self) -> tuple[float, float, float]:
        """Microseconds of plan, encode and update."""
        begin = time.perf_counter()
        plan = self.core.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        self._codec.encode(plan)
        encoded = time.perf_counter()
        result = self._result(plan)
        started = time.perf_counter()
        outcome = self._codec.decode(step_pb2.StepResult.FromString(result))
        outputs = self.core.apply(outcome.result, 0.0)
        ended = time.perf_counter()
        assert len(outputs.groups) == self._num_running
        return 1e6 * (planned - begin), 1e6 * (encoded - planned), 1e6 * (ended - started)

    def _result(self, plan: Plan) -> bytes:
        """Every row goes on with its pattern; of its drafts, `accepted` are taken for right."""
        for new in plan.new_rows:
            self._sequences[new.row], self._positions[new.row] = new.sequence, 0
            self._starts[new.row] = len(new.token_ids)
        drafts = {row: min(len(token_ids), self._accepted) for row, token_ids in plan.drafts}
        rows = [row for row, _ in plan.batch]
        counts = np.array([1 + drafts.get(row, 0) for row in rows])
        token_ids = np.concatenate(
            [
                self._token(int(self._sequences[row]), 0)
                + (int(self._starts[row] + self._positions[row]) + np.arange(count)) % PATTERN
                for row, count in zip(rows, counts.tolist(), strict=True)
            ]
        )
        result = step_pb2.StepResult(
            epoch=1,
            step=plan.step,
            sequences=self._sequences[rows].astype("<i8").tobytes(),
            positions=self._positions[rows].astype("<i4").tobytes(),
            num_tokens=counts.astype("<i4").tobytes() if drafts else b"",
            token_ids=token_ids.astype("<i4").tobytes(),
        )
        self._positions[rows] += counts
        return result.SerializeToString()


def measure(method: str, num_running: int, *, accepted: int, pays: bool = True) -> Cost:
    bench = Bench(num_running, METHODS[method], accepted=accepted, pays=pays)
    wake_up()
    gc.collect()
    gc.freeze()
    spans = [bench.step() for _ in range(_NUM_FIRST + NUM_STEPS)][_NUM_FIRST:]
    plan_us, encode_us, update_us = (round(statistics.median(column), 1) for column in zip(*spans, strict=True))
    has_drafts = pays and METHODS[method] is not None
    assert (bench.core.stats.num_drafts > NUM_STEPS * num_running // 2) == has_drafts
    return Cost(
        method=method if pays or method == "off" else f"{method}, no drafts",
        running=num_running,
        drafts=NUM_DRAFTS if has_drafts else 0,
        accepted=accepted if has_drafts else 0,
        plan_us=plan_us,
        encode_us=encode_us,
        update_us=update_us,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--running", type=int, default=256, help="rows (default: %(default)s)")
    arguments = parser.parse_args()
    cases = [("off", 0, False)]
    for method in ("ngram", "suffix"):
        cases += [(method, 3, True), (method, 2, True), (method, 0, False)]
    cases.append(("workers", 0, False))
    for method, accepted, pays in cases:
        cost = measure(method, arguments.running, accepted=accepted, pays=pays)
        line = asdict(cost) | {"scheduler_us": cost.scheduler_us}
        show(line, as_json=arguments.json)


if __name__ == "__main__":
    main()
