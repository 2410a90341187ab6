"""The steps in flight: plans go to the workers, results come back to the core."""

import logging
import math
import time

from protos import step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import Plan, StepOutputs
from scheduler.lockstep.lockstep import WaveError
from scheduler.ranks.epochs import Event
from scheduler.ranks.step_wire import ResultError, StepClock, StepCodec, StepTotals
from scheduler.sessions.requests import Requests
from scheduler.step_costs import StepCostMeter
from scheduler.step_loop.connections import Connections
from scheduler.telemetry.reports import Reports, warn_of_preemptions

log = logging.getLogger("octavo.scheduler")


# The next step is planned this long before the steps in flight should have returned. So its plan is at the workers in
# time. A plan made earlier would miss the requests that come meanwhile: they would wait for one step more, and a step
# of prefills may take a second.
_AHEAD_S = 0.01


class StepPipeline:
    """Keeps up to max_steps_in_flight steps in flight: with one stage, the next one only when the workers soon need it.
    In lockstep, a replica sends the steps of a wave even if it computes nothing.

    Failures of the workers are returned as events, which the caller must handle at once.
    """

    def __init__(self, connections: Connections, requests: Requests, reports: Reports, *, step_timeout: float) -> None:
        self._workers, self._heartbeats = connections.workers, connections.heartbeats
        self._epochs = connections.workers.epochs
        self._lockstep, self._awake = connections.lockstep, connections.awake
        self._requests, self._reports = requests, reports
        self._step_timeout = step_timeout
        # None before the first epoch.
        self._core: Core | None = None
        self._codec = StepCodec(0)
        self._clock = StepClock()
        self._costs = StepCostMeter()
        # Those of the results since the last `take_outputs`; read only for callers.
        self.outputs: list[StepOutputs] = []
        self._is_in_wave = False

    def begin_epoch(self, core: Core, epoch: int) -> None:
        """Begins an epoch: the workers are ready for the plans of this core."""
        self._core = core
        self._codec = StepCodec(epoch)
        self._heartbeats.epoch, self._heartbeats.step = epoch, 0
        if self._lockstep is not None:
            self._lockstep.begin_epoch(core.settings.max_steps_in_flight)

    def void(self) -> None:
        """Forgets the steps in flight: the epoch has ended, so no more results come."""
        self._clock.clear()

    @property
    def is_needed(self) -> bool:
        """True if other replicas need this one to take part in their steps."""
        return self._is_in_wave and self._workers.is_ready

    def apply(self, result: step_pb2.StepResult, now: float) -> list[Event]:
        """Applies a result to the core; `take_outputs` returns the outputs."""
        if self._core is None or result.step != self._clock.awaited:
            log.debug("the result of step %d is ignored: step %s is awaited", result.step, self._clock.awaited)
            return []
        self._reports.note_returned(result.step, self._clock.elapsed(now), now)
        try:
            outcome = self._codec.decode(result)
            if self._lockstep is not None:
                self._lockstep.note_result(result.step, result.num_tokens_of_all)
        except (ResultError, WaveError) as error:
            return self._workers.fail_epoch(f"the result of step {result.step} can't be used: {error}")
        plan, seconds = self._clock.finish(now)
        self._costs.note(plan, seconds, result.timing.draft, num_drafted=len(result.drafts))
        for key, frame in outcome.prompt_logprobs:
            self._requests.collect_prompt_logprobs(key, frame)
        began = time.monotonic()
        self.outputs.append(self._core.apply(outcome.result, now))
        # The time of its plan is part of the step's.
        self._costs.note_scheduling(time.monotonic() - began, has_drafts=plan.has_drafts)
        if self._core.settings.speculation is not None and self._costs.may_have_news and (costs := self._costs.take()):
            self._core.set_costs(costs)
        return []

    def schedule(self) -> list[Event]:
        """Plans and sends steps until max_steps_in_flight are in flight or nothing more can run."""
        core = self._core
        events: list[Event] = []
        while core is not None and self._epochs.is_ready and not events:
            began = time.monotonic()
            if self._time_to_plan(core, began) > began:
                break
            try:
                plan = self._next_plan(core, began)
            except WaveError as error:
                return self._workers.end_epoch(str(error))
            if plan is None:
                break
            self._clock.send(plan, began, self._costs.expect(plan))
            events = self._workers.send_plan(self._codec.encode(plan))
            self._heartbeats.step = plan.step
            self._reports.note_sent(plan, began)
        return events

    def next_check(self, now: float) -> float:
        """When `schedule` may have a plan though nothing has happened."""
        core = self._core
        if core is None or core.num_steps_in_flight >= core.settings.max_steps_in_flight:
            return math.inf
        time_to_plan = self._time_to_plan(core, now)
        return time_to_plan if time_to_plan > now else math.inf

    def _time_to_plan(self, core: Core, now: float) -> float:
        """When the next step is to be planned. Of several stages, the first one needs it as soon as may be."""
        return now if core.settings.num_stages > 1 else now + self._clock.left(now) - _AHEAD_S

    def _next_plan(self, core: Core, now: float) -> Plan | None:
        """The next plan; None if nothing can run, or may not run yet. Raises WaveError."""
        lockstep, step = self._lockstep, self._codec.step + 1
        if lockstep is not None:
            self._is_in_wave = lockstep.is_in_wave(step)
            if not self._is_in_wave:
                if core.has_work:
                    lockstep.want_wave(step, now)
                return None
        plan = core.schedule(now) if core.has_work else None
        if preempted := core.take_events():
            warn_of_preemptions(preempted, self._requests.trace_id)
        if lockstep is not None:
            plan = plan or core.schedule_empty()
            if plan is not None:
                lockstep.note_sent(plan)
        return plan

    @property
    def totals(self) -> StepTotals:
        """Sums over the steps that have returned."""
        return self._clock.totals

    def take_outputs(self) -> list[StepOutputs]:
        """Returns the outputs of the results since the last call."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def overdue(self, now: float) -> str:
        """The reason to end the epoch because a step has not returned in time; empty if none is overdue."""
        if (elapsed := self._clock.elapsed(now, self._awake)) <= self._step_timeout:
            return ""
        cause = f"step {self._clock.awaited} has not returned for {elapsed:.1f} s (step_timeout={self._step_timeout:g})"
        if self._lockstep is not None and self._lockstep.waiting_for:
            cause += f"; all wait for {self._lockstep.waiting_for}"
        return cause
