"""The numbers of a model that a plan reads."""

import pytest

from octavo.lab.errors import PlanError
from octavo.plan.costs.model_shape import shape_from_config


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_models_that_do_not_run_on_gpus_are_not_planned(model_type: str) -> None:
    with pytest.raises(
        PlanError, match=f"model_type={model_type} has layers that carry a state .* on CPUs only so far"
    ):
        shape_from_config({"model_type": model_type}, "m")
