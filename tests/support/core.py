"""Drives a scheduling core against the fake worker, for tests of what the core decides."""

from collections.abc import Iterable, Sequence

from scheduler.core import Core
from scheduler.messages import (
    ChoiceStart,
    CoreSettings,
    FinishReason,
    GroupRequest,
    Plan,
    Rejection,
    Result,
    SequenceKey,
    SequenceOutput,
    StopRules,
)
from tests.fakes.model import FakeWorker


def make_settings(**changes: object) -> CoreSettings:
    """Blocks of 4 tokens and enough of everything, but for `changes`."""
    settings: dict[str, object] = {
        "block_size": 4, "num_blocks": 100, "max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    }  # fmt: skip
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
    """choices: how many, from their first token; or their starts. `sampling` is the fake worker's scope, here 0."""
    starts = tuple(ChoiceStart(choice=i) for i in range(choices)) if isinstance(choices, int) else tuple(choices)
    return GroupRequest(
        group=group,
        request_id=f"request-{group}",
        prompt_token_ids=tuple(prompt),
        choices=starts,
        stop=stop or StopRules(max_tokens=max_tokens, ignore_eos=True),
        **({"sampling": 0} | fields),  # type: ignore[arg-type]
    )


class CoreDriver:
    """A core and its worker. Collects outputs, and asserts that they have no gap and that nothing follows an end."""

    def __init__(self, **changes: object) -> None:
        self.settings = make_settings(**changes)
        self.core = Core(self.settings)
        self.worker = self._make_worker(self.settings.num_blocks)
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.ends: dict[SequenceKey, SequenceOutput] = {}

    def _make_worker(self, num_blocks: int) -> FakeWorker:
        settings = self.settings
        return FakeWorker(
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )

    def submit(self, request: GroupRequest, now: float = 0.0) -> Rejection | None:
        rejection = self.core.submit(request, now)
        if rejection is None:
            for start in request.choices:
                self.tokens[request.group, start.choice] = list(start.output_token_ids)
                self.ends.pop((request.group, start.choice), None)
        self.collect(self.core.take_outputs())
        return rejection

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            tokens = self.tokens[output.key]
            assert output.key not in self.ends, "an output after the end"
            assert output.first_token == len(tokens), "a gap"
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.key] = output

    def schedule(self, now: float = 0.0) -> tuple[Plan, Result] | None:
        """A plan, and what the worker made of it; not applied yet."""
        plan = self.core.schedule(now)
        self.core.check_integrity()
        return None if plan is None else (plan, self.worker.run(plan))

    def apply(self, plan: Plan, result: Result, now: float = 0.0) -> list[SequenceOutput]:
        outputs = self.core.apply(plan, result, now)
        self.core.check_integrity()
        self.collect(outputs)
        return outputs

    def step(self, now: float = 0.0) -> Plan | None:
        step = self.schedule(now)
        if step is None:
            return None
        self.apply(*step, now)
        return step[0]

    def finish(self, max_steps: int = 10_000) -> int:
        """Runs until nothing is left; the number of steps.

        Asserts that each step has something to do, and that no block stays in use.
        """
        steps = 0
        while self.core.has_work:
            assert self.step() is not None, "an empty step while something waits"
            steps += 1
            assert steps <= max_steps, "no progress"
        load = self.core.load
        assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
        assert load.num_free_blocks == load.num_blocks
        return steps

    def lose_workers(self, num_blocks: int | None = None, now: float = 0.0) -> None:
        self.core.lose_workers(now)
        if num_blocks is not None:
            self.core.resize(num_blocks)
            self.collect(self.core.take_outputs())
        self.worker = self._make_worker(num_blocks or self.worker.num_blocks)

    def running(self) -> set[SequenceKey]:
        """Keys of the sequences that the worker holds a row for and the core still runs."""
        keys = (self.core.key_of(row.planned.sequence) for row in self.worker.rows.values())
        return {key for key in keys if key is not None}

    def reason(self, group: int, choice: int = 0) -> FinishReason | None:
        return self.ends[group, choice].finish_reason
