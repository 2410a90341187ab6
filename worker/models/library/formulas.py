"""Exchanges modules of the library that are known by the formula that they compute: RMS norms, which are eight
operations each, and gated MLPs. Each model has classes of its own for them, so a class's name says nothing.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kernels.elementwise.rms_norm import rms_norm
from kernels.elementwise.silu_mul import Activation, silu_mul
from kernels.native.library import NativeKernels
from worker.models.library.modules import OctavoLinear, Product

# Attributes by which classes of norms name their epsilon.
_EPS = ("variance_epsilon", "eps", "epsilon")
# Relative. Forms of one formula differ by a few roundings of float32; other formulas by far more.
SAME = 1e-5


class OctavoNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, weight_N: torch.Tensor, eps: float, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight_N, self.eps, self._kernels = weight_N.float().contiguous(), eps, kernels
        self._address = self.weight_N.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, x = len(self.weight_N), x.contiguous()
        assert x.dtype is torch.float32
        y = torch.zeros_like(x)
        num_rows = x.numel() // size
        self._kernels.add_rms_norm(x.data_ptr(), self._address, self.eps, num_rows, size, y.data_ptr())
        return y

    # nn.Module's own call looks for hooks, which there are none of.
    __call__ = forward


def exchanged_norm(module: nn.Module, kernels: NativeKernels) -> OctavoNorm | None:
    """Returns the norm that computes as `module`, whose weight is loaded; None if there is none."""
    parameters = dict(module.named_parameters())
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    weight_N = parameters.get("weight")
    if eps is None or weight_N is None or len(parameters) != 1 or weight_N.ndim != 1 or list(module.children()):
        return None
    size = len(weight_N)
    # Rows of different sizes, so that eps has a part in some, and not of mean 0.
    generator = torch.Generator().manual_seed(0)
    x_TN = torch.randn(6, size, generator=generator) + 0.3
    x_TN *= torch.tensor([1e-4, 1e-2, 1.0, 30.0, eps**0.5, 1e3])[:, None]
    try:
        expected_TN = module(x_TN)
    except Exception:  # noqa: BLE001 - a module that takes other inputs may raise anything
        return None
    if not isinstance(expected_TN, torch.Tensor) or expected_TN.shape != x_TN.shape:
        return None
    for candidate_N in (weight_N, 1 + weight_N):
        formula_TN = rms_norm(x_TN, candidate_N.float(), eps)
        if bool(((expected_TN - formula_TN).abs() <= SAME * formula_TN.abs().amax(1, keepdim=True)).all()):
            return OctavoNorm(candidate_N, eps, kernels)
    return None


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
