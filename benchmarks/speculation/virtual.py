"""Runs the choice of drafts on a virtual clock: real outputs, and steps that take what a table says.

    python -m benchmarks.speculation.virtual                              generates the outputs first: some 3 minutes
    python -m benchmarks.speculation.virtual --outputs FILE               keeps them in FILE, or takes them from there
    python -m benchmarks.speculation.virtual --steps 1:15.2,8:22,16:40,32:77,64:146,512:1150 --scheduler 0.35:1.1
    python -m benchmarks.speculation.virtual --draft 1:4,8:11,64:30 --catch-up 0.4 [--right 0.95] --streams 4,8,16

SmolLM2's greedy outputs of the workloads of `python -m benchmarks.speculation` go through the scheduling core once
without speculation and once with n-gram suffixes. --steps: milliseconds of steps by their tokens, linear in between;
each varies at random by some 5%. --scheduler: what the scheduler takes of a step while its drafters rest, and while
they do not. With --draft, a drafter of the workers drafts instead, up to 4 tokens: milliseconds of one more draft by
the number of rows; --catch-up is what a token takes that it lacks, --right the share of its drafts that are right if
those before them are. Prints for each workload and number of streams the output tokens a second over those without
speculation, as the median and the least of three rounds, over the time in which all streams are busy; the share of
accepted drafts; drafts a step; and the share of steps in which drafters rest.
"""

import argparse
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import show
from benchmarks.speculation.turns import Workbench
from benchmarks.speculation.workloads import MAX_TOKENS, MODEL, workloads
from octavo.plan.costs.step_shape import PaperRows
from protos import inference_pb2
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, Result, Speculation, StopRules
from scheduler.ranks.step_wire import GroupSampling
from scheduler.step_costs import StepCostMeter

_STREAMS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS, _LEAST_REQUESTS, _REQUESTS_A_STREAM = 3, 4, 3
_SPREAD = 0.05
# Drafts of a row by the workers' drafter.
_NUM_DRAFTS = 4
# Two cores of a Zen 5.
_STEPS = "1:9,2:9.3,4:9.7,8:11,16:17,32:30,64:52,128:100,512:370"


@dataclass(slots=True)
class Turn:
    rate: float
    num_drafts: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_resting: int = 0


class VirtualDrafter:
    """A drafter of the workers, which knows what follows, and errs at random."""

    def __init__(self, draft: dict[int, float], catch_up: float, right: float) -> None:
        """draft, catch_up: milliseconds, as in --draft and --catch-up."""
        self._rows, self._seconds = list(draft), [each / 1e3 for each in draft.values()]
        self._catch_up, self._right = catch_up / 1e3, right
        self._random = np.random.default_rng(1)
        # By sequence: the tokens that it has computed.
        self._known: dict[int, int] = {}

    def propose(self, plan: Plan, rows: dict[int, tuple[int, int, list[int]]]) -> tuple[float, dict[int, tuple]]:
        """The seconds of a plan's drafts, and drafts by sequence. rows: by row, its sequence, the tokens before those
        that it has just got, and what follows them."""
        if not plan.wanted_drafts:
            return 0.0, {}
        drafts, num_lacking = {}, 0
        for row, count in plan.wanted_drafts:
            sequence, position, following = rows[row]
            # Those of the last step are computed with the first draft anyway.
            num_lacking += max(0, position - self._known.get(sequence, 0) - _NUM_DRAFTS - 1)
            self._known[sequence] = position
            is_right = self._random.random(count) < self._right
            drafts[sequence] = tuple(
                token if right else token + 1 for token, right in zip(following, is_right.tolist(), strict=False)
            )
        most = max(count for _, count in plan.wanted_drafts)
        seconds = most * float(np.interp(len(drafts), self._rows, self._seconds))
        return seconds + self._catch_up * num_lacking, {sequence: each for sequence, each in drafts.items() if each}


class VirtualEngine:
    """The scheduling core, and workers that say what is known, in the time of a table."""

    def __init__(
        self,
        steps: dict[int, float],
        scheduler: tuple[float, float],
        *,
        has_drafters: bool,
        drafter: VirtualDrafter | None = None,
    ) -> None:
        self._tokens, self._seconds = list(steps), [each / 1e3 for each in steps.values()]
        speculation = Speculation(drafters=("suffix",)) if has_drafters else None
        if drafter is not None:
            speculation = Speculation(
                num_speculative_tokens=_NUM_DRAFTS, drafters=(), workers_draft=True, workers_catch_up=True
            )
        self._resting, self._drafting = (each / 1e3 for each in scheduler)
        self._core = Core(
            CoreSettings(
                block_size=16,
                num_blocks=20_000,
                max_model_len=2048,
                max_num_seqs=max(_STREAMS),
                max_num_batched_tokens=2048,
                enable_prefix_caching=False,
                speculation=speculation,
            )
        )
        self._has_drafters, self._drafter = speculation is not None, drafter
        self._meter, self._now = StepCostMeter(), 0.0
        self._random, self._groups = np.random.default_rng(0), itertools.count(1)
        # The outputs of the requests that run, by group.
        self._outputs: dict[int, list[int]] = {}
        self._rows = PaperRows(max(_STREAMS), acceptance=None, output_of=self._output_of)

    def turn(self, texts: Sequence[tuple[list[int], list[int]]], streams: int) -> Turn:
        """Computes requests, prompts and outputs, `streams` at once. The rate is that until one stream has no more."""
        waiting, running = deque(texts), self._outputs
        start, num_tokens, turn = self._now, 0, Turn(0.0)
        while waiting or running:
            while waiting and len(running) < streams:
                prompt, output = waiting.popleft()
                running[group := next(self._groups)] = output
                self._submit(group, prompt, output)
            plan = self._core.schedule(self._now)
            assert plan is not None
            turn.num_steps += 1
            _, result = self._rows.apply(plan)
            drafting, result.drafts = self._draft(plan, result)
            turn.num_resting += self._take_time(plan, drafting, len(result.drafts))
            num_tokens += len(result.token_ids)
            turn.num_drafts += len(plan.draft_token_ids)
            turn.num_accepted += len(result.token_ids) - len(result.sequences)
            for end in self._core.apply(result, self._now).ends:
                assert not end.message, end.message
                del running[end.key[0]]
            if waiting or streams == 1:
                turn.rate = num_tokens / (self._now - start)
        return turn

    def _submit(self, group: int, prompt: list[int], output: list[int]) -> None:
        self._core.submit(
            GroupRequest(
                group=group,
                request_id=str(group),
                prompt_token_ids=tuple(prompt),
                choices=(ChoiceStart(choice=0),),
                stop=StopRules(max_tokens=len(output), ignore_eos=True),
                sampling=GroupSampling(inference_pb2.SamplingParams(), group=group, first_choice=0),
            ),
            self._now,
        )

    def _draft(self, plan: Plan, result: Result) -> tuple[float, dict[int, tuple[int, ...]]]:
        if self._drafter is None:
            return 0.0, {}
        counts = np.ones(len(result.sequences), np.int64) if result.num_tokens is None else result.num_tokens
        wanted, rows = dict(plan.wanted_drafts), {}
        for sequence, first, count in zip(
            result.sequences.tolist(), result.positions.tolist(), counts.tolist(), strict=True
        ):
            row = self._core._state.running.by_generation[sequence].row
            if row in wanted:
                following = self._output_of(sequence)[first + count :][: wanted[row]]
                num_prompt = self._core._state.running.by_generation[sequence].num_prompt_tokens
                rows[row] = sequence, num_prompt + first, following
        return self._drafter.propose(plan, rows)

    def _take_time(self, plan: Plan, drafting: float, num_drafted: int) -> bool:
        """Lets the time of a step pass. Returns True if the drafters rest."""
        number, last = plan.num_tokens, self._tokens[-1]
        seconds = float(np.interp(number, self._tokens, self._seconds)) * max(1.0, number / last)
        noise = math.exp(_SPREAD * self._random.standard_normal())
        seconds, drafting = (seconds + drafting) * noise, drafting * noise
        drafters = self._core._state.drafting
        rests = drafters is None or drafters.rests
        scheduling = self._resting if rests else self._drafting
        self._now += seconds + scheduling
        self._meter.note(plan, seconds, drafting, num_drafted=num_drafted)
        self._meter.note_scheduling(scheduling, has_drafts=plan.has_drafts)
        if self._has_drafters and self._meter.may_have_news and (costs := self._meter.take()):
            self._core.set_costs(costs)
        return rests

    def _output_of(self, sequence: int) -> list[int]:
        key = self._core.key_of(sequence)
        assert key is not None
        return self._outputs[key[0]]


def _texts(path: Path | None) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By workload: prompts and outputs."""
    if path is not None and path.exists():
        return {
            name: [(prompt, output) for prompt, output in each] for name, each in json.loads(path.read_text()).items()
        }
    bench, found = Workbench([], model={"model": MODEL}, threads=2, temperature=0.0), {}
    for name in MAX_TOKENS:
        prompts = [list(map(int, prompt)) for prompt in workloads()[name].prompts(MODEL)]
        outputs = bench.turn("off", workloads()[name], prompts, range(len(prompts)), max(_STREAMS)).outputs
        found[name] = [(prompt, outputs[index]) for index, prompt in enumerate(prompts)]
    if path is not None:
        path.write_text(json.dumps(found))
    return found


def _numbers(text: str) -> dict[int, float]:
    return {int(key): float(value) for key, value in (each.split(":") for each in text.split(","))}


def _pair(text: str) -> tuple[float, float]:
    resting, drafting = map(float, text.split(":"))
    return resting, drafting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=Path, help="a JSON file for the outputs")
    parser.add_argument("--steps", type=_numbers, default=_STEPS, help="default: %(default)s")
    parser.add_argument("--scheduler", type=_pair, default="0.1:0.6", help="ms, default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--draft", type=_numbers, help="of the workers' drafter")
    parser.add_argument("--catch-up", type=float, default=0.4, help="ms, default: %(default)s")
    parser.add_argument("--right", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--workloads", default=",".join(MAX_TOKENS), help="default: %(default)s")
    parser.add_argument("--streams", default=",".join(map(str, _STREAMS)), help="default: %(default)s")
    arguments = parser.parse_args()
    drafter, given = None, {}
    if arguments.draft:
        drafter = VirtualDrafter(arguments.draft, arguments.catch_up, arguments.right)
        given = {"draft": arguments.draft, "catch_up": arguments.catch_up, "right": arguments.right}
    off = VirtualEngine(arguments.steps, arguments.scheduler, has_drafters=False)
    on = VirtualEngine(arguments.steps, arguments.scheduler, has_drafters=drafter is None, drafter=drafter)
    all_texts = _texts(arguments.outputs)
    for name in arguments.workloads.split(","):
        texts = all_texts[name]
        on.turn(texts[:8], 8)
        for streams in map(int, arguments.streams.split(",")):
            count, ratios, turns = max(_REQUESTS_A_STREAM * streams, _LEAST_REQUESTS), list[float](), list[Turn]()
            for number in range(_ROUNDS):
                chosen = [texts[(number * count + i) % len(texts)] for i in range(count)]
                turns.append(on.turn(chosen, streams))
                ratios.append(turns[-1].rate / off.turn(chosen, streams).rate)
            num_drafts, num_steps = sum(each.num_drafts for each in turns), sum(each.num_steps for each in turns)
            line = {
                "workload": name,
                "streams": streams,
                "ratio": round(statistics.median(ratios), 3),
                "least": round(min(ratios), 3),
                "accepted": round(sum(each.num_accepted for each in turns) / max(1, num_drafts), 2),
                "drafts_a_step": round(num_drafts / num_steps, 1),
                "resting": round(sum(each.num_resting for each in turns) / num_steps, 2),
                **given,
            }
            show(line, as_json=arguments.json)


if __name__ == "__main__":
    main()
