"""kernels/moe_routing against a loop over tokens."""

from typing import Any

import pytest
import torch

from kernels.moe.routing.reference import route_reference
from kernels.moe.routing.triton import route
from tests.support.gpu.gpu import DEVICE

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (8, {"top_k": 2}),
    "softmax-as-it-is": (60, {"top_k": 4, "renormalize": False}),
    "one-expert": (1, {"top_k": 1}),
    "llama4": (16, {"top_k": 1, "scoring": "sigmoid", "renormalize": False}),
    "all": (5, {"top_k": 5}),
    "deepseek-v2": (
        160,
        {"top_k": 6, "num_groups": 8, "top_k_groups": 3, "renormalize": False, "scaling_factor": 16.0},
    ),
    "deepseek-v3": (
        64,
        {"top_k": 8, "scoring": "sigmoid", "num_groups": 8, "top_k_groups": 4, "scaling_factor": 2.5},
    ),
}


def inputs(case: str, num_tokens: int = 7) -> tuple[torch.Tensor, dict[str, Any]]:
    num_experts, options = CASES[case]
    generator = torch.Generator().manual_seed(num_experts)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator) * 2
    if case == "deepseek-v3":
        options = {**options, "bias_E": torch.randn(num_experts, generator=generator).to(DEVICE)}
    return logits_TE.to(DEVICE), options


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case: str):
    logits_TE, options = inputs(case)
    weights_TK, experts_TK = route(logits_TE, **options)
    expected_weights, expected_experts = route_reference(logits_TE, **options)
    assert experts_TK.tolist() == expected_experts.tolist()
    # float32 exponentials and sums of some hundred numbers.
    torch.testing.assert_close(weights_TK.double().cpu(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v3"])
def test_of_equals_the_lowest_is_chosen(case: str):
    logits_TE, options = inputs(case)
    if "bias_E" in options:
        options["bias_E"] = torch.zeros_like(options["bias_E"])
    # Zeros of both signs are equal.
    logits_TE[:] = 0.0
    logits_TE[:, 1::2] = -0.0
    _, experts_TK = route(logits_TE, **options)
    assert experts_TK.tolist() == [list(range(options["top_k"]))] * len(logits_TE)


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v2", "deepseek-v3"])
def test_a_token_with_nan_gets_experts_in_range_and_leaves_the_others_alone(case: str):
    logits_TE, options = inputs(case)
    expected_weights, expected_experts = route(logits_TE, **options)
    num_experts = logits_TE.shape[1]
    logits_TE[2, ::2] = float("nan")
    logits_TE[4] = float("nan")
    weights_TK, experts_TK = route(logits_TE, **options)
    for token in (2, 4):
        assert len(set(experts_TK[token].tolist())) == options["top_k"]
        assert all(0 <= expert < num_experts for expert in experts_TK[token].tolist())
    assert torch.isnan(weights_TK[4]).any()
    others = [0, 1, 3, 5, 6]
    assert torch.equal(experts_TK[others], expected_experts[others])
    assert torch.equal(weights_TK[others], expected_weights[others])


def test_padding_and_other_ranks_experts_are_nowhere():
    logits_TE, options = inputs("mixtral")
    weights_TK, experts_TK = route(logits_TE, **options)
    local_E = torch.tensor([-1, -1, -1, 0, 1, 2, -1, -1], dtype=torch.int32, device=DEVICE)
    # The contents of padding must not show.
    logits_TE[5:] = float("nan")
    count = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    local_weights, local_TK = route(logits_TE, **options, local_experts_E=local_E, num_tokens_1=count)
    assert torch.equal(local_weights[:5], weights_TK[:5])
    assert local_TK[:5].tolist() == [[local_E[expert].item() for expert in row] for row in experts_TK[:5].tolist()]
    assert (local_TK[5:] == -1).all()
    assert (local_weights[5:] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 2, "num_groups": 3}, "num_groups=3"),
        ({"top_k": 3, "num_groups": 4, "top_k_groups": 1}, "top_k=3"),
        ({"top_k": 1, "num_groups": 4, "top_k_groups": 5}, "top_k_groups=5"),
    ],
)
def test_what_cannot_be_routed_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(1, 8), **options)
