"""Drives a scheduling core against the fake worker, for tests of the core's decisions."""

from collections.abc import Iterable, Sequence

import numpy as np

from scheduler.core.core import Core
from scheduler.core.messages import (
    ChoiceStart,
    CoreSettings,
    FinishReason,
    GroupRequest,
    Plan,
    Rejection,
    Result,
    SequenceEnd,
    SequenceKey,
    StepOutputs,
    StopRules,
)
from tests.fakes.model import FakeSampling
from tests.fakes.plan_worker import Drafter, PlanWorker


def make_settings(**changes: object) -> CoreSettings:
    """Settings with blocks of 4 tokens and plenty of everything else, except for `changes`."""
    settings: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 100,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return CoreSettings(**(settings | changes))  # type: ignore[arg-type]


def make_request(
    group: int,
    prompt: Iterable[int],
    *,
    max_tokens: int = 4,
    choices: int | Sequence[ChoiceStart] = 1,
    stop: StopRules | None = None,
    **fields: object,
) -> GroupRequest:
    """choices: their number, each beginning at its first token; or their starts."""
    starts = tuple(ChoiceStart(choice=i) for i in range(choices)) if isinstance(choices, int) else tuple(choices)
    return GroupRequest(
        group=group,
        request_id=f"request-{group}",
        prompt_token_ids=tuple(prompt),
        choices=starts,
        stop=stop or StopRules(max_tokens=max_tokens, ignore_eos=True),
        **({"sampling": FakeSampling()} | fields),  # type: ignore[arg-type]
    )


def counts_of(plan: Plan) -> list[int]:
    """Tokens that each row of the batch computes, in batch order."""
    return [count for _, count in plan.batch]


def tokens_of(outputs: StepOutputs) -> dict[SequenceKey, list[int]]:
    keys = list(zip(outputs.groups.tolist(), outputs.choices.tolist(), strict=True))
    counts = [1] * len(keys) if outputs.num_tokens is None else outputs.num_tokens.tolist()
    assert len(set(keys)) == len(keys) == len(outputs.first_tokens) == len(counts)
    token_ids, found = iter(outputs.token_ids.tolist()), {}
    for key, count in zip(keys, counts, strict=True):
        found[key] = [next(token_ids) for _ in range(count)]
    assert next(token_ids, None) is None
    return found


class CoreDriver:
    """A core and its worker. Collects outputs; asserts that they have no gaps and that nothing follows an end."""

    def __init__(self, *, drafter: Drafter | None = None, **changes: object) -> None:
        self.settings = make_settings(**changes)
        self.core = Core(self.settings)
        self.worker = self._make_worker(self.settings.num_blocks)
        self._drafter = drafter
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.ends: dict[SequenceKey, SequenceEnd] = {}

    def _make_worker(self, num_blocks: int) -> PlanWorker:
        settings = self.settings
        return PlanWorker(
            block_size=settings.block_size,
            num_blocks=num_blocks,
            num_swap_blocks=settings.num_swap_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )

    def submit(self, request: GroupRequest, now: float = 0.0) -> Rejection | None:
        rejection = self.core.submit(request, now)
        if rejection is None:
            for start in request.choices:
                self.tokens[request.group, start.choice] = list(start.output_token_ids)
                self.ends.pop((request.group, start.choice), None)
        self.collect_ends(self.core.take_ends())
        return rejection

    def collect_ends(self, ends: list[SequenceEnd]) -> None:
        for end in ends:
            assert end.key not in self.ends, "two ends"
            self.ends[end.key] = end

    def cancel(self, group: int, *choices: int, now: float = 0.0) -> list[SequenceKey]:
        """Returns the keys of the sequences that were live. They get no entry in `ends`."""
        ends = self.core.cancel(group, choices or None, now)
        assert all(end.reason is FinishReason.CANCELLED for end in ends)
        return [end.key for end in ends]

    def expire(self, now: float) -> list[SequenceKey]:
        ends = self.core.expire(now)
        assert all(end.reason is FinishReason.CANCELLED for end in ends)
        return [end.key for end in ends]

    def schedule(self, now: float = 0.0) -> tuple[Plan, Result] | None:
        """A plan and the worker's result for it, not applied yet."""
        plan = self.core.schedule(now)
        self.core.check_integrity()
        return None if plan is None else (plan, self.worker.run(plan, drafter=self._drafter))

    def apply(self, result: Result, now: float = 0.0) -> StepOutputs:
        outputs = self.core.apply(result, now)
        self.core.check_integrity()
        for (key, token_ids), first in zip(tokens_of(outputs).items(), outputs.first_tokens, strict=True):
            assert key not in self.ends, "tokens after the end"
            assert first == len(self.tokens[key]), "a gap"
            self.tokens[key] += token_ids
        self.collect_ends(outputs.ends)
        return outputs

    def step(self, now: float = 0.0) -> Plan | None:
        """Schedules, runs and applies one plan, so that at most one is in flight."""
        step = self.schedule(now)
        if step is None:
            return None
        plan, result = step
        self.apply(result, now)
        return plan

    def finish(self, max_steps: int = 10_000) -> int:
        """Runs until nothing is left; returns the number of steps.

        Asserts that each step has something to do, and that no block stays in use.
        """
        steps = 0
        while self.core.has_work:
            assert self.step() is not None, "an empty step while something waits"
            steps += 1
            assert steps <= max_steps, "no progress"
        load = self.core.load
        assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
        assert (load.num_free_blocks, load.num_free_swap_blocks) == (load.num_blocks, self.settings.num_swap_blocks)
        return steps

    def lose_workers(self, num_blocks: int | None = None, now: float = 0.0) -> None:
        self.core.lose_workers(now)
        if num_blocks is not None:
            self.core.resize(num_blocks, self.settings.num_swap_blocks, now=now)
            self.collect_ends(self.core.take_ends())
        self.worker = self._make_worker(num_blocks or self.worker.num_blocks)

    def running(self) -> set[SequenceKey]:
        """Keys of the sequences that have a row in the worker and still run in the core."""
        keys = (self.core.key_of(row.sequence) for row in self.worker.rows.values())
        return {key for key in keys if key is not None}

    def reason(self, group: int, choice: int = 0) -> FinishReason:
        return self.ends[group, choice].reason


def make_result(step: int, *entries: tuple[int, int, int], **fields: object) -> Result:
    """entries: (sequence, position, token)."""
    sequences, positions, token_ids = zip(*entries, strict=True) if entries else ((), (), ())
    return Result(
        step=step,
        sequences=np.array(sequences, np.int64),
        positions=np.array(positions, np.int32),
        token_ids=np.array(token_ids, np.int32),
        **fields,  # type: ignore[arg-type]
    )
