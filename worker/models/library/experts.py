"""Experts of a model of transformers, one packed linear layer after the other. Routing, gate and activation are the
library's.

Legend: T tokens, E hidden size, K experts of a token, I intermediate size.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.backend import Backend
from kernels.linear import PackedLinear
from worker.layers.forward_context import current
from worker.models.library.modules import EXPERTS, Product, product_of
from worker.models.library.tensors import expert_tensor
from worker.weights.reader import WeightReader

# torch computes this many numbers at once; see worker.models.library.probe.
_AT_ONCE = 32


class Experts:
    """Computes each expert over the tokens routed to it. A token's results are summed in the order of its experts'
    numbers, whatever other tokens there are."""

    def __init__(
        self, module: nn.Module, prefix: str, reader: WeightReader, backend: Backend, *, is_shared: bool
    ) -> None:
        """prefix: the module's name. is_shared: the tensor-parallel ranks each compute a part of every expert."""
        holder: Any = module
        self._module = holder
        self._up = "gate_up_proj" if holder.has_gate else "up_proj"
        self._is_shared = is_shared
        width = getattr(holder, self._up).shape[2 if holder.is_transposed else 1]
        num_inner = width // 2 if holder.has_gate else width
        own = backend.shard.of(num_inner, "moe_intermediate_size") if is_shared else slice(0, num_inner)
        parts = [own]
        if holder.has_gate and is_shared:
            parts = [own, slice(own.start + num_inner, own.stop + num_inner)]
        elif holder.has_gate:
            parts = [slice(0, width)]
        self._multiple = _AT_ONCE // math.gcd(_AT_ONCE, own.stop - own.start)
        numbers = range(len(getattr(holder, self._up)))
        self._ups = [self._load_up(prefix, number, parts, reader, backend) for number in numbers]
        self._downs = [
            self._load_down(prefix, number, own if is_shared else None, reader, backend) for number in numbers
        ]

    def _load_up(
        self, prefix: str, number: int, parts: list[slice], reader: WeightReader, backend: Backend
    ) -> tuple[Product, int]:
        name = expert_tensor(prefix, number, self._up)
        bias_O: torch.Tensor | None = None
        if self._module.has_bias:
            whole_O = reader(expert_tensor(prefix, number, self._up, "bias"))
            bias_O = torch.cat([whole_O[part] for part in parts])
        packed = PackedLinear([reader.weight(name, part) for part in parts], bias_O, backend)
        return product_of(packed, backend.compute_dtype), packed.num_bytes

    def _load_down(
        self, prefix: str, number: int, inputs: slice | None, reader: WeightReader, backend: Backend
    ) -> tuple[Product, int]:
        bias_O: torch.Tensor | None = None
        if self._module.has_bias:
            bias_O = reader(expert_tensor(prefix, number, "down_proj", "bias"))
            if inputs is not None and not backend.shard.is_first:
                bias_O = None
        packed = PackedLinear(reader.weight(expert_tensor(prefix, number, "down_proj"), None, inputs), bias_O, backend)
        return product_of(packed, backend.compute_dtype), packed.num_bytes

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in (*self._ups, *self._downs))

    def __call__(self, x_TE: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out_TE = torch.zeros_like(x_TE)
        for number in experts_TK.unique().tolist():
            # Numbers beyond the last expert's stand for no expert.
            if number >= len(self._ups):
                continue
            tokens, places = (experts_TK == number).nonzero(as_tuple=True)
            y = self._downs[number][0](self._gated(self._ups[number][0](x_TE[tokens])))
            if self._module.has_post_expert_norm:
                y = self._module.post_expert_norm(y)
            out_TE[tokens] += weights_TK[tokens, places, None] * y
        if self._is_shared:
            current().group.sum_(out_TE)
        return out_TE

    def _gated(self, up: torch.Tensor) -> torch.Tensor:
        """The library's function of each token, on a number of rows at which it has the same bits for each."""
        num_rows = len(up)
        missing = -num_rows % self._multiple
        if missing:
            up = functional.pad(up, (0, 0, 0, missing))
        gated = self._module._apply_gate(up) if self._module.has_gate else self._module.act_fn(up)
        return gated[:num_rows]


def compute_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *_: Any
) -> torch.Tensor:
    """The experts function that the library's modules call."""
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    return module.octavo_experts(hidden_states, top_k_index, top_k_weights)  # pyright: ignore[reportCallIssue]


def register_experts() -> None:
    """Enters the function into the library's registry."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, compute_experts)
