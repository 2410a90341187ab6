"""Decoder layers of the library: attention over the normed stream is added to it, then a gated MLP over the normed sum.

Legend: T tokens of the step, R rows with padding, E hidden size.
"""

from collections.abc import Mapping
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import nn

from kernels.linear import PackedLinear
from worker.layers.forward_context import current
from worker.layers.residual import LayerOutput, ResidualStream
from worker.models.library.formulas.norm import OctavoNorm, is_same
from worker.models.library.formulas.rotated import PagedHeads
from worker.models.library.stages import StandIn

_NUM_TOKENS = 5


class _Made(nn.Module):
    """Stands for attention or an MLP: has a made up result."""

    def __init__(self, result: torch.Tensor, *, gives_weights: bool) -> None:
        super().__init__()
        self._result, self._gives_weights = result, gives_weights
        self.inputs: list[torch.Tensor] = []

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.inputs.append(hidden_states)
        return (self._result, None) if self._gives_weights else self._result


def find_norms(
    module: nn.Module, attention: str, mlp: str, norms: Mapping[str, OctavoNorm], hidden_size: int
) -> tuple[str, str] | None:
    """Returns the names of the norms before attention and before the MLP; None if the module is no layer of this form.
    attention, mlp: names of its children. norms: its other children."""
    generator = torch.Generator().manual_seed(0)
    x, made, added = (torch.randn(1, _NUM_TOKENS, hidden_size, generator=generator) * 3 for _ in range(3))
    stands = {attention: _Made(made, gives_weights=True), mlp: _Made(added, gives_weights=False)}
    if set(dict(module.named_children())) != {*stands, *norms} or len(norms) != 2:
        return None
    kept = {name: module._modules[name] for name in stands}
    module._modules.update(stands)
    angles = torch.zeros(1, _NUM_TOKENS, 2)
    try:
        y = module(x.clone(), position_embeddings=(angles, angles), attention_mask=None)
    except Exception:  # noqa: BLE001 - a module that takes other inputs may raise anything
        return None
    finally:
        module._modules.update(kept)
    inputs = [each.inputs for each in stands.values()]
    if not isinstance(y, torch.Tensor) or any(len(each) != 1 for each in inputs):
        return None
    if not is_same(y, x + made + added):
        return None
    for before_attention, before_mlp in permutations(norms):
        expected = norms[before_attention](x), norms[before_mlp](x + made)
        if all(is_same(each[0], normed) for each, normed in zip(inputs, expected, strict=True)):
            return before_attention, before_mlp
    return None


class OctavoLayer(StandIn):
    def __init__(
        self, layer: nn.Module, heads: PagedHeads, o: PackedLinear, gate_up: PackedLinear, down: PackedLinear
    ) -> None:
        """layer: gets exchanged. The layers that `heads` and gate_up begin with have its norms."""
        super().__init__(layer)
        self._heads, self._o, self._gate_up, self._down = heads, o, gate_up, down

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: Any,
    ) -> torch.Tensor:
        """hidden_states: float32 [1, R, E]. Rows of padding stay as they are."""
        y_1RE = hidden_states.clone(memory_format=torch.contiguous_format)
        x_TE = y_1RE[0, : len(current().slots_T)]
        o_TF = self._heads(x_TE, position_embeddings)
        x = ResidualStream(x_TE)
        x = x + LayerOutput(lambda into_TE: self._o.add_to_(into_TE, o_TF))
        x = x + LayerOutput(partial(self._add_mlp_to_, x_TE))
        return y_1RE

    def _add_mlp_to_(self, x_TE: torch.Tensor, into_TE: Any) -> None:
        hidden = partial(current().workspace.take, "mlp", len(x_TE), self._gate_up.num_outputs)
        self._gate_up.add_through_(self._down, x_TE, hidden, into=into_TE)

    # nn.Module's own call looks for hooks, which there are none of.
    __call__ = forward
