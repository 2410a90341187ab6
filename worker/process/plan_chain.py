"""The order of an epoch's plans."""

from protos import step_pb2
from runtime.wire import plan_digest
from worker.errors import PlanError


class PlanChain:
    """Checks step numbers and digests within an epoch. A rank that missed a plan finds out here, before it would hang
    in a collective."""

    def __init__(self) -> None:
        self._step = 0
        self._digest = b""

    def follow(self, plan: step_pb2.StepPlan, payload: bytes) -> None:
        """Adds a plan. payload: its serialized bytes. Raises PlanError if the plan before it is missing or differs."""
        if plan.step != self._step + 1:
            raise PlanError(f"step: {plan.step} follows {self._step}; a plan is missing, or arrived twice")
        if plan.previous_digest != self._digest:
            raise PlanError(
                f"previous_digest: {plan.previous_digest.hex() or 'empty'} in step {plan.step}, but the plan before it "
                f"has {self._digest.hex() or 'none'}"
            )
        self._step, self._digest = plan.step, plan_digest(payload)
