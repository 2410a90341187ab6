"""kernels/moe/routing on a CPU against a loop over tokens. (On a GPU: test_routing_triton.py.)"""

from typing import Any

import pytest
import torch

from kernels.moe.routing.reference import route_reference
from kernels.moe.routing.torch_cpu import route

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (8, {"top_k": 2}),
    "softmax-as-it-is": (60, {"top_k": 4, "renormalize": False}),
    "one-expert": (1, {"top_k": 1}),
    "llama4": (16, {"top_k": 1, "scoring": "sigmoid", "renormalize": False}),
    "deepseek-v2": (40, {"top_k": 6, "num_groups": 8, "top_k_groups": 3, "renormalize": False, "scaling_factor": 16.0}),
    "deepseek-v3": (
        64,
        {
            "top_k": 8,
            "scoring": "sigmoid",
            "num_groups": 8,
            "top_k_groups": 4,
            "scaling_factor": 2.5,
            "bias_E": torch.randn(64, generator=torch.Generator().manual_seed(1)),
        },
    ),
}


def _logits(num_experts: int, num_tokens: int = 9) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_experts)) * 2


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case: str) -> None:
    num_experts, options = CASES[case]
    weights_TK, experts_TK = route(_logits(num_experts), **options)
    expected_weights, expected_experts = route_reference(_logits(num_experts), **options)
    assert experts_TK.tolist() == expected_experts.tolist()
    # float32 exponentials and sums of some dozens of numbers.
    torch.testing.assert_close(weights_TK.double(), expected_weights, rtol=1e-5, atol=1e-7)


def test_logits_decide_where_scores_are_equal() -> None:
    """In float32 the sigmoid is 1 for 20 and every larger number."""
    weights_TK, experts_TK = route(torch.tensor([[20.0, 30.0, -1.0]]), top_k=1, scoring="sigmoid", renormalize=False)
    assert (weights_TK.tolist(), experts_TK.tolist()) == ([[1.0]], [[1]])


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v2", "deepseek-v3"])
def test_of_equals_the_lowest_is_chosen(case: str) -> None:
    num_experts, options = CASES[case][0], dict(CASES[case][1])
    if "bias_E" in options:
        options["bias_E"] = torch.zeros(num_experts)
    _, experts_TK = route(torch.zeros(3, num_experts), **options)
    assert experts_TK.tolist() == [list(range(options["top_k"]))] * 3


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_its_bits_alone_and_among_others(case: str) -> None:
    """Vectorized functions round a tensor's last few numbers differently if these don't fill a vector."""
    num_experts, options = CASES[case]
    logits_TE = _logits(num_experts, 67)
    weights_TK, experts_TK = route(logits_TE, **options)
    for token in range(len(logits_TE)):
        weights_1K, experts_1K = route(logits_TE[token : token + 1], **options)
        assert torch.equal(weights_1K[0], weights_TK[token])
        assert torch.equal(experts_1K[0], experts_TK[token])
