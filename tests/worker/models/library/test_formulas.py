"""Modules are exchanged for kernels by what they compute, and stay as they are if that differs in anything."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.support.kernels.kernel_paths import native
from worker.models.library.formulas import Gated, exchanged_norm, find_gated
from worker.models.library.modules import exchange_linear

SIZE, INNER = 20, 28


class _Clipped(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(max=2.0)


class _Centred(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class _OtherEps(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * functional.rms_norm(hidden_states, (SIZE,), eps=1e-9)


@pytest.mark.parametrize(
    ("cls", "is_known"),
    [
        (LlamaRMSNorm, True),
        (GemmaRMSNorm, True),
        (nn.RMSNorm, True),
        (nn.LayerNorm, False),
        (_Clipped, False),
        (_Centred, False),
        (_OtherEps, False),
    ],
)
def test_norms(cls: Callable[..., nn.Module], is_known: bool) -> None:
    torch.manual_seed(0)
    module = cls(SIZE, eps=1e-5).requires_grad_(requires_grad=False)
    weight = module.get_parameter("weight")
    weight.copy_(torch.randn(SIZE))
    norm = exchanged_norm(module, native())
    assert (norm is not None) == is_known
    if norm is not None:
        x = torch.randn(1, 5, SIZE) * 3
        torch.testing.assert_close(norm(x), module(x), rtol=1e-5, atol=1e-6)
        # Heads of a token, which are not contiguous.
        heads = torch.randn(1, 5, 3, SIZE).transpose(1, 2)
        torch.testing.assert_close(norm(heads), module(heads), rtol=1e-5, atol=1e-6)


class _MLP(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, INNER), nn.Linear(SIZE, INNER)
        self.c = nn.Linear(INNER, SIZE)
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self._function(self.a(x), self.b(x)))


@pytest.mark.parametrize(
    ("function", "gated"),
    [
        (lambda a, b: functional.silu(a) * b, Gated(gate="a", up="b", down="c", activation="silu")),
        (
            lambda a, b: a * functional.gelu(b, approximate="tanh"),
            Gated(gate="b", up="a", down="c", activation="gelu_tanh"),
        ),
        (lambda a, b: functional.gelu(a) * b, None),
        (lambda a, b: functional.silu(a).clamp(max=3) * b, None),
        (lambda a, b: functional.silu(a) + b, None),
    ],
)
def test_gated_mlps(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], gated: Gated | None) -> None:
    mlp = _MLP(function)
    for each in (mlp.a, mlp.b, mlp.c):
        exchange_linear(each)
    with torch.no_grad():
        assert find_gated(mlp) == gated
