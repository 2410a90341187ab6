"""Costs of steps that tests tell the core instead of measured ones: what is drafted then depends on no clock."""

import pytest

from scheduler.core.messages import StepCosts
from scheduler.step_costs import StepCostMeter

# A draft costs nothing.
FREE = StepCosts(num_tokens=(1, 64), seconds=(1.0, 1.0), draft_seconds=(0.0, 0.0))


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every meter of this process returns FREE."""
    monkeypatch.setattr(StepCostMeter, "take", lambda _: FREE)
