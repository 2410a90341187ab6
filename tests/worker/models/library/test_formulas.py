"""Modules are exchanged for kernels by what they compute, and stay as they are if that differs in anything."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.support.kernels.kernel_paths import native
from worker.models.library.attention import attend
from worker.models.library.formulas.gated import Gated, find_gated
from worker.models.library.formulas.norm import OctavoNorm, exchanged_norm
from worker.models.library.formulas.rotated import Rotated, find_rotated
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


HEAD, PAIRS = 12, 4


class _Attention(nn.Module):
    """Attention as most models of transformers have it. Of a head, the first 2 * PAIRS numbers are rotated."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.layer_idx = 0
        self.a, self.b, self.c = (nn.Linear(SIZE, heads * HEAD) for heads in (num_heads, num_kv_heads, num_kv_heads))
        self.d = nn.Linear(num_heads * HEAD, SIZE)

    def heads(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotary, rest = x[..., : 2 * PAIRS], x[..., 2 * PAIRS :]
        return torch.cat((apply_rotary_pos_emb(rotary, rotary, cos, sin)[0], rest), dim=-1)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (self.heads(hidden_states, each) for each in (self.a, self.b, self.c))
        q, k = (self.rotate(each, *position_embeddings) for each in (q, k))
        o, _ = attend(self, q, k, v, None, scaling=0.3, softcap=20.0)
        return self.d(o.flatten(2)), None


class _Normed(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.of_k, self.of_q = (OctavoNorm(torch.rand(HEAD) + 0.5, 1e-5, native()) for _ in range(2))

    def heads(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        x = super().heads(x, layer)
        return self.of_q(x) if layer is self.a else self.of_k(x) if layer is self.b else x


class _Swapped(_Attention):
    """q, k and v are known by what they become, not by their order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = self.c, self.a

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: object) -> Any:
        v, k, q = (self.heads(hidden_states, each) for each in (self.a, self.b, self.c))
        q, k = (self.rotate(each, *position_embeddings) for each in (q, k))
        return self.d(attend(self, q, k, v, None, scaling=0.3, softcap=20.0)[0].flatten(2)), None


class _Unrotated(_Attention):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x


class _NeighboursRotated(_Attention):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotary, rest = x[..., : 2 * PAIRS], x[..., 2 * PAIRS :]
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((rotary * cos + turned * sin, rest), dim=-1)


class _Heated(_Attention):
    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate(x, cos, sin) * 1.01


class _ValueRotated(_Attention):
    def heads(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return super().heads(x, layer) * (1.5 if layer is self.c else 1.0)


class _ResultChanged(_Attention):
    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: object) -> Any:
        y, _ = super().forward(hidden_states, position_embeddings, **kwargs)
        return y * 0.5, None


class _Gated(_Attention):
    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: object) -> Any:
        return super().forward(hidden_states.tanh(), position_embeddings, **kwargs)


def _found(attention: nn.Module) -> Rotated | None:
    for child in attention.children():
        if isinstance(child, nn.Linear):
            exchange_linear(child)
    norms = {name: child for name, child in attention.named_children() if isinstance(child, OctavoNorm)}
    with torch.no_grad():
        return find_rotated(attention, HEAD, 2 * PAIRS, norms)


@pytest.mark.parametrize(
    ("cls", "differs"),
    [
        (_Attention, {}),
        (_Normed, {"norms": ("of_q", "of_k")}),
        (_Swapped, {"q": "c", "v": "a"}),
        (_Unrotated, {"is_rotated": False}),
    ],
)
def test_attention(cls: Callable[[], nn.Module], differs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = Rotated(q="a", k="b", v="c", o="d", norms=(), is_rotated=True, scale=0.3, soft_cap=20.0)
    assert _found(cls()) == replace(expected, **differs)


@pytest.mark.parametrize("cls", [_NeighboursRotated, _Heated, _ValueRotated, _ResultChanged, _Gated])
def test_other_attention(cls: Callable[[], nn.Module]) -> None:
    assert _found(cls()) is None
