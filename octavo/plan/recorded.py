"""What-if: the requests of a recorded trace, and what its steps took, to be planned under other settings.

`octavo up --trace FILE` records the calls of each scheduler's core. Replayed, they tell every request with its tokens
and its time, and the seconds of every step: a workload and a cost model, without another measurement.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octavo.lab.errors import PlanError
from octavo.plan.costs.samples import EngineSettings, Measurements, StepRecorder
from octavo.plan.costs.step_shape import PaperRows, StepShape
from octavo.plan.workload import NO_PREFIX, Workload
from scheduler.core.core import Core
from scheduler.core.messages import CoreSettings, GroupRequest, Plan, SequenceEnd, SequenceKey, StepOutputs
from scheduler.core.saved import Snapshot
from scheduler.recording.records import Origin, RecordingError
from scheduler.recording.replay import Observer, replay

# More than of a benchmark, whose steps are alike.
_MAX_SAMPLES = 600
# Options that the core's settings tell.
_OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "scheduling_policy",
    "priority_aging",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "preemption_mode",
    "max_queued_requests",
    "max_queued_tokens",
    "max_model_len",
)


@dataclass(slots=True)
class RecordedRequest:
    """One choice of a request. arrival: seconds since 1970."""

    arrival: float
    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The contents of traces. The settings are those of the last file."""

    settings: CoreSettings
    # In order of arrival, without those that had begun before the trace, or have no output.
    requests: Sequence[RecordedRequest]
    num_left_out: int
    steps: StepRecorder
    num_replicas: int

    def workload(self, concurrency: int = 0) -> Workload:
        """The requests at their times, with their tokens."""
        requests = self.requests
        arrivals = np.array([each.arrival for each in requests])
        return Workload(
            arrivals=arrivals - arrivals[0],
            prompt_lens=np.array([len(each.prompt) for each in requests]),
            output_lens=np.array([len(each.output) for each in requests]),
            prefix_ids=np.full(len(requests), NO_PREFIX),
            prefix_lens=np.zeros(len(requests), np.int64),
            concurrency=concurrency,
            prompts=[each.prompt for each in requests],
            outputs=[each.output for each in requests],
        )

    def measurements(self) -> Measurements:
        """The recorded steps. Raises PlanError if there are none."""
        samples = self.steps.samples()
        if not samples:
            raise PlanError("--trace: no step of the trace can be used to fit costs: give --fit or --gpu as well")
        settings = self.settings
        engine = EngineSettings(
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            max_model_len=settings.max_model_len,
            kv_cache_memory=0.0,
        )
        return Measurements(model="a recorded trace", engine=engine, samples=samples, serve=())

    def options(self) -> dict[str, object]:
        """The recorded values of options, by name; those that a plan takes from the trace unless they are given."""
        # The option is in milliseconds.
        return {
            **{name: getattr(self.settings, name) for name in _OPTIONS},
            "inter_token_latency_target": self.settings.inter_token_latency_target * 1e3,
        }


def read_recording(paths: Iterable[Path], on_progress: Callable[[int], None] = lambda num_bytes: None) -> Recording:
    """Replays traces. Raises PlanError if a file is no trace, or does not replay to the recorded plans."""
    reader = _Reader()
    try:
        outcomes = replay(paths, on_progress=on_progress, observer=reader)
    except RecordingError as error:
        raise PlanError(f"--trace: {error}") from None
    for outcome in outcomes:
        if outcome.difference is not None:
            raise PlanError(
                f"--trace: {outcome.path} does not replay to the same plans from step {outcome.difference.step} on: "
                "`octavo replay` shows the difference; plan with the version that recorded it"
            )
    done = sorted((each for each in reader.requests if each.output), key=lambda each: each.arrival)
    if not done or reader.settings is None or reader.steps is None:
        raise PlanError("--trace: it holds no request with an output")
    return Recording(
        settings=reader.settings,
        requests=done,
        num_left_out=reader.num_begun_before + len(reader.requests) - len(done),
        steps=reader.steps,
        num_replicas=len(reader.replicas),
    )


class _Reader(Observer):
    """Collects requests and steps."""

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.num_begun_before = 0
        self.settings: CoreSettings | None = None
        self.steps: StepRecorder | None = None
        self.replicas: set[int] = set()
        self._live: dict[SequenceKey, RecordedRequest] = {}
        # Seconds to add to the process's clock; None until the first call of a process.
        self._offset: float | None = None

    def on_file(self, origin: Origin, snapshot: Snapshot, core: Core, *, continues: bool) -> None:
        self.settings = snapshot.settings
        self._core = core
        self.replicas.add(origin.replica)
        if self.steps is None:
            self.steps = StepRecorder(snapshot.settings.max_num_seqs, max_samples=_MAX_SAMPLES)
        if continues:
            return
        self._live, self._offset, self._unix_time = {}, None, origin.unix_time
        self.num_begun_before += sum(len(group.sequences) for group in snapshot.groups)
        self._rows = PaperRows(snapshot.settings.max_num_seqs)
        # Rows whose tokens are not known: those of sequences that run already, or have drafts.
        self._unknown = {
            each.row for group in snapshot.groups for each in group.sequences if each.row >= 0 and each.block_ids
        }
        # Shape of each plan in flight (None: it can't be told), and when it was made.
        self._in_flight: deque[tuple[StepShape | None, float]] = deque()
        # The plans that were in flight at the start have results, too.
        self._in_flight.extend((None, 0.0) for _ in snapshot.in_flight)
        # When the last result came, if work was left then.
        self._busy_since: float | None = None

    def on_submit(self, request: GroupRequest, now: float) -> None:
        if self._offset is None:
            self._offset = self._unix_time - now
        for start in request.choices:
            each = RecordedRequest(now + self._offset, (*request.prompt_token_ids, *start.output_token_ids))
            self._live[request.group, start.choice] = each
            self.requests.append(each)

    def on_plan(self, plan: Plan, now: float) -> None:
        for new in plan.new_rows:
            self._unknown.discard(new.row)
        shape, _ = self._rows.apply(plan)
        is_known = not self._unknown or self._unknown.isdisjoint(
            (*plan.decode_rows.tolist(), *(row for row, _ in plan.chunks))
        )
        is_known = is_known and not plan.has_drafts and plan.num_tokens > 0
        # How many of the drafts are right changes where the row stands.
        self._unknown.update(plan.rows_with_drafts.tolist())
        self._in_flight.append((shape if is_known else None, now))

    def on_outputs(self, outputs: StepOutputs, now: float) -> None:
        if self._in_flight:
            shape, planned = self._in_flight.popleft()
            # A step begins when the one before has ended, or when it is planned, if nothing ran or was left to run.
            began = planned if self._busy_since is None else self._busy_since
            if shape is not None and now > began and self.steps is not None:
                self.steps.add_shape(shape, now - began)
        self._busy_since = now if self._core.has_work else None
        start = 0
        counts = [1] * len(outputs.groups) if outputs.num_tokens is None else outputs.num_tokens.tolist()
        for group, choice, count in zip(outputs.groups.tolist(), outputs.choices.tolist(), counts, strict=True):
            if (each := self._live.get((group, choice))) is not None:
                each.output += outputs.token_ids[start : start + count].tolist()
            start += count

    def on_ends(self, ends: Iterable[SequenceEnd]) -> None:
        for end in ends:
            self._live.pop(end.key, None)

    def on_loss(self) -> None:
        self._in_flight.clear()
        self._busy_since = None
