"""Replays the calls of a recording on a new core, and compares every plan."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.core.core import Core
from scheduler.core.messages import GroupRequest, Plan, SequenceEnd, StepOutputs, Timeline
from scheduler.core.saved import Snapshot
from scheduler.core.snapshot import check_sizes
from scheduler.recording.differences import Differing, describe, differing_plans, differing_values
from scheduler.recording.file import RecordingFile
from scheduler.recording.records import (
    Apply,
    BlameStep,
    Call,
    Cancel,
    ItemFailed,
    ItemPrepared,
    LoseWorkers,
    Origin,
    RecordedColumns,
    RecordingError,
    ResetPrefixCache,
    Resize,
    Schedule,
    ScheduleEmpty,
    SetCosts,
    Submit,
    plan_record,
)

# Calls to show before a difference.
_NUM_CALLS_SHOWN = 10
_CALLS_BETWEEN_PROGRESS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first plan that differs from the recorded one."""

    # The recorded step: the one planned, or the one planned last.
    step: int
    # Seconds since the first call of the file.
    time: float
    # The field that differs, such as "decode_rows[3]".
    field: str
    expected: str
    got: str
    # The calls up to the difference, latest last.
    calls: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Replayed:
    """The outcome for one file, or for the part of it that could be replayed."""

    path: Path
    origin: Origin
    num_requests: int = 0
    num_calls: int = 0
    # Plans that were compared, and the tokens computed in them.
    num_plans: int = 0
    num_tokens: int = 0
    # Number of times that neither the recorded core nor this one made a plan.
    num_without_plan: int = 0
    num_epochs_lost: int = 0
    num_preemptions: int = 0
    # Time between the first call and the last.
    seconds: float = 0.0
    # Bytes of an incomplete record at the end of the file.
    num_torn_bytes: int = 0
    difference: Difference | None = None
    # Timelines of the explained request.
    timelines: list[Timeline] = field(default_factory=list)
    # Time of the last call, on the core's clock.
    now: float = 0.0


class Observer:
    """Learns what happened in a recording while it is replayed. `now` is on the clock of the recorded process."""

    def on_file(self, origin: Origin, snapshot: Snapshot, core: Core, *, continues: bool) -> None:
        """A file begins. continues: with the state that the file before ended in."""

    def on_submit(self, request: GroupRequest, now: float) -> None: ...

    def on_plan(self, plan: Plan, now: float) -> None: ...

    def on_outputs(self, outputs: StepOutputs, now: float) -> None:
        """The result of the oldest plan came."""

    def on_ends(self, ends: Iterable[SequenceEnd]) -> None:
        """Sequences ended, those of a step after `on_outputs` of that step."""

    def on_loss(self) -> None:
        """The steps in flight are lost."""


def replay(
    paths: Iterable[Path],
    *,
    explain: str | None = None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    observer: Observer | None = None,
) -> list[Replayed]:
    """Replays the files, in the order in which they were written, up to the first difference.

    A file that continues the previous one must also begin with the state that the previous one led to. explain: the id
    of a request whose timelines are wanted. on_progress: called with the number of bytes read since the last call.
    Raises RecordingError.
    """
    replayed: list[Replayed] = []
    before: Replay | None = None
    for path in _in_order(paths):
        with RecordingFile(path) as file:
            each = Replay(file, explain=explain, observer=observer)
            replayed.append(each.outcome)
            continues = before is not None and before.is_continued_by(file.origin)
            if before is not None:
                if continues:
                    each.compare_start(before.core.save())
                else:
                    before.collect_live_timelines()
            if observer is not None:
                observer.on_file(file.origin, file.snapshot, each.core, continues=continues)
            each.run(on_progress)
        before = each
        if each.outcome.difference is not None:
            break
    if before is not None:
        before.collect_live_timelines()
    return replayed


def _in_order(paths: Iterable[Path]) -> list[Path]:
    def order(path: Path) -> tuple[int, float]:
        with RecordingFile(path) as file:
            return file.origin.replica, file.origin.unix_time

    return sorted(paths, key=order)


class Replay:
    """Replays one file."""

    def __init__(self, file: RecordingFile, *, explain: str | None = None, observer: Observer | None = None) -> None:
        """Raises RecordingError if the file's snapshot contradicts itself."""
        self._file, self._explain = file, explain
        self._observer = observer or Observer()
        self._columns = RecordedColumns()
        self._latest: deque[tuple[float, Call]] = deque(maxlen=_NUM_CALLS_SHOWN)
        self._began: float | None = None
        self._step = file.snapshot.step
        # Groups of the explained request.
        self._groups: set[int] = set()
        self.outcome = Replayed(path=file.path, origin=file.origin)
        try:
            check_sizes(file.snapshot)
            self.core = Core(file.snapshot.settings)
            self.core.restore(file.snapshot)
        except (AssertionError, LookupError, ValueError, OverflowError) as error:
            raise RecordingError(f"{file.path}: the snapshot contradicts itself: {error}") from None
        self._num_preemptions = self.core.stats.num_preemptions
        for group in file.snapshot.groups:
            self._note_group(group.request)

    def is_continued_by(self, origin: Origin) -> bool:
        """True if the file of `origin` begins where this one ended."""
        mine = self.outcome.origin
        return (mine.run, mine.number + 1) == (origin.run, origin.number) and not self.outcome.num_torn_bytes

    def compare_start(self, state: Snapshot) -> None:
        """Compares the file's snapshot with the state that the previous file led to."""
        differing = differing_values("state", self._file.snapshot, state)
        if differing is not None:
            self._differ(*differing)

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Replays to the end of the file or the first difference. Raises RecordingError."""
        outcome, file, read = self.outcome, self._file, 0
        calls = iter(file)
        try:
            while outcome.difference is None and (call := next(calls, None)) is not None:
                self._make(call)
                if not outcome.num_calls % _CALLS_BETWEEN_PROGRESS:
                    on_progress(file.position - read)
                    read = file.position
        except RecordingError as error:
            raise RecordingError(f"{error}; the {outcome.num_plans} plans before it replay equally") from None
        on_progress(file.size - read)
        outcome.num_torn_bytes = file.num_torn_bytes
        outcome.num_preemptions = self.core.stats.num_preemptions - self._num_preemptions

    def _make(self, call: Call) -> None:
        """Makes one call to the core."""
        outcome = self.outcome
        outcome.num_calls += 1
        if not isinstance(call, ItemPrepared | ResetPrefixCache | ScheduleEmpty | SetCosts):
            self._began = call.now if self._began is None else self._began
            outcome.now, outcome.seconds = call.now, call.now - self._began
        self._latest.append((outcome.seconds, call))
        try:
            differing = self._carry_out(call)
        except RecordingError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the core is a difference
            differing = "call", "no error", f"{type(error).__name__}: {error}"
        self.core.take_events()
        self.core.take_wanted_items()
        if differing is not None:
            self._differ(*differing)

    def _carry_out(self, call: Call) -> Differing | None:
        core, outcome = self.core, self.outcome
        match call:
            case Submit():
                outcome.num_requests += 1
                self._note_group(call.request)
                core.submit(call.request, call.now)
                self._observer.on_submit(call.request, call.now)
                core.take_displaced()
                self._note_ends(core.take_ends())
            case Cancel():
                self._note_ends(core.cancel(call.group, call.choices, call.now, cause=call.cause))
            case Schedule():
                return self._compare(call, lambda: core.schedule(call.now))
            case ScheduleEmpty():
                return self._compare(call, core.schedule_empty)
            case Apply():
                outputs = core.apply(self._columns.unpack(call.result), call.now)
                self._observer.on_outputs(outputs, call.now)
                self._note_ends(outputs.ends)
            case LoseWorkers():
                outcome.num_epochs_lost += 1
                self._observer.on_loss()
                core.lose_workers(call.now)
            case BlameStep():
                core.blame_step(call.now)
                self._note_ends(core.take_ends())
            case Resize():
                core.resize(
                    call.num_blocks, call.num_swap_blocks, encoder_cache_size=call.encoder_cache_size, now=call.now
                )
                self._note_ends(core.take_ends())
            case SetCosts():
                core.set_costs(call.costs)
            case ItemPrepared():
                core.item_prepared(call.number)
            case ItemFailed():
                self._note_ends(core.item_failed(call.number, call.message, call.now))
            case ResetPrefixCache():
                core.reset_prefix_cache()
        return None

    def _compare(self, call: Schedule | ScheduleEmpty, schedule: Callable[[], Plan | None]) -> Differing | None:
        expected = None if call.plan is None else self._columns.lengthen(call.plan)
        self._step = self._step if expected is None else expected.step
        plan = schedule()
        differing = differing_plans(expected, None if plan is None else plan_record(plan))
        if differing is None and plan is None:
            self.outcome.num_without_plan += 1
        elif differing is None and plan is not None:
            self.outcome.num_plans += 1
            self.outcome.num_tokens += plan.num_tokens
            self._observer.on_plan(plan, self.outcome.now)
        return differing

    def _differ(self, name: str, expected: str, got: str) -> None:
        self.outcome.difference = Difference(
            step=self._step,
            time=self.outcome.seconds,
            field=name,
            expected=expected,
            got=got,
            calls=tuple(f"{seconds:.6f} s  {describe(call)}" for seconds, call in self._latest),
        )

    # --- The explained request

    def _note_group(self, request: GroupRequest) -> None:
        if request.request_id == self._explain:
            self._groups.add(request.group)

    def _note_ends(self, ends: Sequence[SequenceEnd]) -> None:
        self._observer.on_ends(ends)
        # Collected now, because the core does not keep finished requests for ever.
        if self._groups and any(end.key[0] in self._groups for end in ends):
            self._collect(is_finished=True)

    def collect_live_timelines(self) -> None:
        """Collects timelines of live requests. Call it if no other file continues this one."""
        if self._groups:
            self._collect(is_finished=False)

    def _collect(self, *, is_finished: bool) -> None:
        for timeline in self.core.explain(self._explain or ""):
            if timeline.is_finished == is_finished and timeline not in self.outcome.timelines:
                self.outcome.timelines.append(timeline)
