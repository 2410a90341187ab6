"""One replica on paper: the real scheduling core, rows that only count, and a pipeline that only takes time."""

import operator
from collections import deque

from octavo.plan.cost_model import CostModel
from octavo.plan.errors import PlanError
from octavo.plan.step_shape import PaperRows
from octavo.plan.workload import Workload
from scheduler.core import Core
from scheduler.messages import (
    ChoiceStart,
    CoreSettings,
    GroupRequest,
    RejectReason,
    Result,
    StepOutputs,
    StopRules,
)


class Replica:
    """Takes requests and steps on one clock with others; times are in seconds."""

    def __init__(self, settings: CoreSettings, cost: CostModel) -> None:
        self.core = Core(settings)
        # Requests that have come and not ended.
        self.num_outstanding = 0
        self.num_steps = 0
        # Of one stage, summed over all steps.
        self.part_seconds = [0.0] * len(cost.parts)
        self.kv_usage_peak = 0.0
        self._settings, self._cost = settings, cost
        self._rows = PaperRows(settings.max_num_seqs)
        self._in_flight: deque[Result] = deque()
        # When the scheduler and each stage have done what they have to do so far.
        self._host_free = 0.0
        self._stage_free = [0.0] * cost.num_stages
        # For the mean use of blocks over time.
        self._kv_usage, self._kv_usage_since, self._kv_usage_seconds = 0.0, 0.0, 0.0

    def submit(self, workload: Workload, index: int, now: float) -> bool:
        """False if the queue is full. Raises PlanError for a request that can never be served."""
        rejection = self.core.submit(
            GroupRequest(
                group=index,
                request_id=str(index),
                prompt_token_ids=workload.prompt(index),
                choices=(ChoiceStart(choice=0),),
                stop=StopRules(max_tokens=int(workload.output_lens[index]), ignore_eos=True),
            ),
            now,
        )
        if rejection is None:
            self.num_outstanding += 1
            return True
        if rejection.reason is RejectReason.QUEUE_FULL:
            return False
        raise PlanError(
            f"request {index + 1} of the workload, {workload.prompt_lens[index]} tokens in and "
            f"{workload.output_lens[index]} out, is refused: {rejection.message}"
        )

    def start_step(self, now: float) -> float | None:
        """Plans a step if one can be planned now. Returns when its result will be there."""
        plan = self.core.schedule(now)
        if plan is None:
            return None
        shape, result = self._rows.apply(plan)
        self._in_flight.append(result)
        parts = self._cost.stage_seconds(shape)
        seconds = sum(parts)
        # Lists: for so few numbers they are faster than arrays.
        self.part_seconds = list(map(operator.add, self.part_seconds, parts))
        self.num_steps += 1
        self._note_kv_usage(now)
        self._host_free = end = max(now, self._host_free) + self._cost.host_seconds
        for stage, free in enumerate(self._stage_free):
            self._stage_free[stage] = end = max(end, free) + seconds
        return end

    def finish_step(self, now: float) -> StepOutputs:
        """Takes in the result of the oldest step in flight."""
        outputs = self.core.apply(self._in_flight.popleft(), now)
        self.num_outstanding -= len(outputs.ends)
        if not self._in_flight:
            self._note_kv_usage(now)
        return outputs

    def mean_kv_usage(self, duration: float) -> float:
        """Share of the blocks in use, over that many seconds from the start."""
        return self._kv_usage_seconds / duration

    def _note_kv_usage(self, now: float) -> None:
        self._kv_usage_seconds += self._kv_usage * (now - self._kv_usage_since)
        self._kv_usage_since = now
        self._kv_usage = 1.0 - self.core.load.num_free_blocks / self._settings.num_blocks
        self.kv_usage_peak = max(self.kv_usage_peak, self._kv_usage)
