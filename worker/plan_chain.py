"""Whether a plan is the one that follows the plan before it."""

from protos import step_pb2
from runtime.wire import plan_digest
from worker.errors import PlanError


class PlanChain:
    """Step numbers and digests of one epoch. A rank that missed a plan finds out here, before it would hang in a
    collective."""

    def __init__(self) -> None:
        self._step = 0
        self._digest = b""

    def follow(self, plan: step_pb2.StepPlan, payload: bytes) -> None:
        """payload: the bytes that carried the plan. Raises PlanError if a plan before it is missing or was another."""
        if plan.step != self._step + 1:
            raise PlanError(f"step: {plan.step} follows {self._step}; a plan is missing, or came twice")
        if plan.previous_digest != self._digest:
            raise PlanError(
                f"previous_digest: {plan.previous_digest.hex() or 'empty'} in step {plan.step}, but the plan before it "
                f"has {self._digest.hex() or 'none'}"
            )
        self._step, self._digest = plan.step, plan_digest(payload)
