"""Gated MLPs of the library, two layers of three."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kernels.elementwise.silu_mul import Activation, silu_mul
from worker.models.library.formulas.norm import SAME
from worker.models.library.modules import OctavoLinear, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """The names of a gated MLP's linear layers within it: down(activation(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str
    activation: Activation


class OctavoGatedMLP(nn.Module):
    def __init__(self, product: Product) -> None:
        """product: of all three layers."""
        super().__init__()
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.reshape(-1, x.shape[-1])).view(x.shape)

    __call__ = forward


def find_gated(module: nn.Module) -> Gated | None:
    """Returns the layers of a gated MLP whose linear layers are exchanged and have no weights yet; None if the module
    is none. The module runs with made up results of its layers."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, OctavoLinear)}
    others = [child for child in module.children() if not isinstance(child, OctavoLinear)]
    if len(layers) != 3 or any(True for child in others for _ in child.parameters()):
        return None
    if any(True for _ in module.parameters(recurse=False)):
        return None
    sizes = {name: (each.in_features, each.out_features) for name, each in layers.items()}
    downs = [name for name, size in sizes.items() if list(sizes.values()).count(size) == 1]
    if len(downs) != 1:
        return None
    last, down = downs[0], layers[downs[0]]
    inner = [name for name in layers if name != last]
    if sizes[last] != sizes[inner[0]][::-1]:
        return None
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(3, each.out_features, generator=generator) * 3 for name, each in layers.items()}
    inputs: dict[str, torch.Tensor] = {}

    def give(name: str, x: torch.Tensor) -> torch.Tensor:
        inputs[name] = x
        return made[name]

    x = torch.randn(1, 3, down.out_features, generator=generator)
    try:
        for name, layer in layers.items():
            layer.octavo.product = partial(give, name)
        y = module(x)
    except Exception:  # noqa: BLE001 - a module that takes other inputs may raise anything
        return None
    finally:
        for layer in layers.values():
            layer.octavo.product = None
    if inputs.keys() != layers.keys() or not isinstance(y, torch.Tensor) or not torch.equal(y[0], made[last]):
        return None
    if not all(torch.equal(inputs[name], x[0]) for name in inner):
        return None
    for gate, up in (inner, inner[::-1]):
        for activation in ("silu", "gelu_tanh"):
            formula = silu_mul(torch.cat((made[gate], made[up]), dim=1), activation=activation)
            if (inputs[last] - formula).abs().max() <= SAME:
                return Gated(gate=gate, up=up, down=last, activation=activation)
    return None
