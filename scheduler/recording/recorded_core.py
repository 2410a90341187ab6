"""A core that records every plan, and every call that plans depend on."""

import dataclasses
from collections.abc import Collection

from scheduler.core.core import Core
from scheduler.core.messages import (
    CoreSettings,
    GroupRequest,
    Plan,
    Rejection,
    Result,
    SequenceEnd,
    StepCosts,
    StepOutputs,
)
from scheduler.recording.file import RecordingWriter
from scheduler.recording.records import (
    Apply,
    BlameStep,
    Call,
    Cancel,
    ItemFailed,
    ItemPrepared,
    LoseWorkers,
    RecordedColumns,
    ResetPrefixCache,
    Resize,
    Schedule,
    ScheduleEmpty,
    SetCosts,
    Submit,
    plan_record,
)


class RecordedCore(Core):
    """Records calls before it makes them, so that a call that fails is the last one in the recording.

    `expire` is recorded as its cancels.
    """

    def __init__(self, settings: CoreSettings, recording: RecordingWriter) -> None:
        super().__init__(settings)
        self._recording = recording
        self._begin_file()

    def submit(self, request: GroupRequest, now: float) -> Rejection | None:
        self._record(Submit(now, dataclasses.replace(request, sampling=None)))
        return super().submit(request, now)

    def cancel(self, group: int, choices: Collection[int] | None, now: float, *, cause: str = "") -> list[SequenceEnd]:
        self._record(Cancel(now, group, None if choices is None else list(choices), cause))
        return super().cancel(group, choices, now, cause=cause)

    def schedule(self, now: float) -> Plan | None:
        if self.num_steps_in_flight >= self.settings.max_steps_in_flight:
            return None
        self._begin_file_if_full()
        try:
            plan = super().schedule(now)
        except Exception:
            self._recording.append(Schedule(now, None))
            raise
        self._recording.append(Schedule(now, None if plan is None else self._columns.shorten(plan_record(plan))))
        return plan

    def schedule_empty(self) -> Plan | None:
        if self.num_steps_in_flight >= self.settings.max_steps_in_flight:
            return None
        self._begin_file_if_full()
        try:
            plan = super().schedule_empty()
        except Exception:
            self._recording.append(ScheduleEmpty(None))
            raise
        assert plan is not None, "there was room for it"
        self._recording.append(ScheduleEmpty(self._columns.shorten(plan_record(plan))))
        return plan

    def apply(self, result: Result, now: float) -> StepOutputs:
        # Before packing the columns, because nothing in a file may refer to another file.
        self._begin_file_if_full()
        self._recording.append(Apply(now, self._columns.pack(result)))
        return super().apply(result, now)

    def set_costs(self, costs: StepCosts) -> None:
        self._record(SetCosts(costs))
        super().set_costs(costs)

    def item_prepared(self, number: int) -> None:
        self._record(ItemPrepared(number))
        super().item_prepared(number)

    def item_failed(self, number: int, message: str, now: float) -> list[SequenceEnd]:
        self._record(ItemFailed(now, number, message))
        return super().item_failed(number, message, now)

    def lose_workers(self, now: float) -> None:
        self._record(LoseWorkers(now))
        super().lose_workers(now)
        self._recording.flush()

    def blame_step(self, now: float) -> int:
        self._record(BlameStep(now))
        return super().blame_step(now)

    def resize(
        self, num_blocks: int, num_swap_blocks: int = 0, *, encoder_cache_size: int | None = None, now: float
    ) -> None:
        self._record(Resize(now, num_blocks, num_swap_blocks, encoder_cache_size))
        super().resize(num_blocks, num_swap_blocks, encoder_cache_size=encoder_cache_size, now=now)
        self._recording.flush()

    def reset_prefix_cache(self) -> int:
        self._record(ResetPrefixCache())
        return super().reset_prefix_cache()

    def _record(self, call: Call) -> None:
        self._begin_file_if_full()
        self._recording.append(call)

    def _begin_file_if_full(self) -> None:
        if self._recording.is_full:
            self._begin_file()

    def _begin_file(self) -> None:
        self._columns = RecordedColumns()
        self._recording.begin(self.save())
