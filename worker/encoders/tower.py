"""The parts of vision towers: norms, attention within sequences of patches, MLPs. The stream of patches is float32.

Legend: N patches, E width, H heads, D head size, F intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.attention.packed import PackedAttention
from kernels.backend import Backend
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight
from kernels.shard import WHOLE
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.norm import Norm
from worker.parallel.groups import Alone, Group
from worker.weights.reader import AdaptedReader, Shape, WeightReader

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# By the names of config.json.
ACTIVATIONS: dict[str, Activation] = {"gelu": F.gelu, "gelu_pytorch_tanh": _gelu_tanh, "quick_gelu": _quick_gelu}
# Patches that go through an MLP at a time: its intermediate results would take more memory than all others.
_ROWS = 4096


def activation_of(name: str) -> Activation:
    """Raises ValueError."""
    if name not in ACTIVATIONS:
        raise ValueError(f"vision_config hidden_act={name!r} is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    width: int
    num_layers: int
    num_heads: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"vision_config {name}={getattr(self, name)}: it must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"vision_config has {self.num_heads} heads, which do not divide its width {self.width}")

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads

    def workspace_bytes(self, num_patches: int, patch_numbers: int) -> int:
        """Returns the bytes of intermediate results for this many patches, as float32: in attention, the stream with
        its norm, q, k and v, what rope makes of two of them, and the result with its projection; in MLPs and for the
        embedding of patches, some rows at a time."""
        rows = min(num_patches, _ROWS)
        return 4 * (12 * num_patches * self.width + rows * (4 * self.intermediate_size + 4 * patch_numbers))

    def backend_of(self, backend: Backend) -> Backend:
        """Returns the backend of the layers: with the whole of each if ranks do not divide heads and MLP."""
        size = backend.shard.size
        is_divided = self.num_heads % size == self.intermediate_size % size == 0
        return backend if is_divided else undivided(backend)


def undivided(backend: Backend) -> Backend:
    """Returns the backend of layers that each rank has as a whole."""
    return replace(backend, shard=WHOLE)


class FloatsReader(AdaptedReader):
    """Reads layers as floats where the language model's are quantized: towers are small beside it, and their errors
    would enter every layer of it."""

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        weight_OI = self(name)[outputs or slice(None)]
        return weight_OI if inputs is None else weight_OI[:, inputs].contiguous()

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self.weight(name, outputs)


class Ranks:
    """The ranks that share a tower's layers. `group` is replaced in each epoch, once its ranks are connected."""

    def __init__(self) -> None:
        self.group: Group = Alone()

    def sum_(self, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Sums a layer's result over the ranks, if they share it. Returns x."""
        if backend.shard.size > 1:
            self.group.sum_(x)
        return x


class LayerNorm:
    def __init__(self, name: str, eps: float, reader: WeightReader, backend: Backend) -> None:
        self._weight_E, self._bias_E = (reader.float32(f"{name}.{kind}").contiguous() for kind in ("weight", "bias"))
        self._eps, self._dtype = eps, backend.compute_dtype

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        """x_NE: float32. The result has the backend's compute_dtype."""
        return F.layer_norm(x_NE, self._weight_E.shape, self._weight_E, self._bias_E, self._eps).to(self._dtype)

    @staticmethod
    def shapes(name: str, width: int) -> dict[str, Shape]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


class RmsNorm:
    def __init__(self, name: str, eps: float, reader: WeightReader, backend: Backend) -> None:
        self._norm, self._dtype = Norm(name, eps, reader, backend), backend.compute_dtype

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See LayerNorm."""
        return self._norm(x_NE, out=torch.empty(x_NE.shape, dtype=self._dtype, device=x_NE.device))

    @staticmethod
    def shapes(name: str, width: int) -> dict[str, Shape]:
        return {f"{name}.weight": (width,)}


TowerNorm = LayerNorm | RmsNorm


class TowerAttention:
    """names: of the projections of q, k and v, and of the output's."""

    def __init__(
        self, shape: TowerShape, names: tuple[str, str, str, str], reader: WeightReader, backend: Backend, ranks: Ranks
    ) -> None:
        self._backend, self._ranks = backend, ranks
        heads = backend.shard.of(shape.num_heads, "heads of the vision tower")
        own = slice(heads.start * shape.head_size, heads.stop * shape.head_size)
        self._num_heads, self._head_size = heads.stop - heads.start, shape.head_size
        self._qkv = load_linear(reader, names[:3], bias=True, backend=backend, outputs=lambda name: own)
        self._output = load_linear(reader, names[3:], bias=True, backend=backend, inputs=own)

    @property
    def num_bytes(self) -> int:
        return self._qkv.num_bytes + self._output.num_bytes

    def __call__(
        self, x_NE: torch.Tensor, attention: PackedAttention, cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Returns [N, E]. x_NE: normed. cos_sin: float32 [N, 1, D / 2] each, of rope on pairs (i, i + D / 2)."""
        qkv_NF = self._qkv(x_NE)
        q_NHD, k_NHD, v_NHD = qkv_NF.view(len(x_NE), 3, self._num_heads, self._head_size).unbind(1)
        if cos_sin is not None:
            for heads_NHD in (q_NHD, k_NHD):
                turn_(heads_NHD, *cos_sin)
        o_NHD = attention(q_NHD, k_NHD, v_NHD, self._head_size**-0.5)
        return self._ranks.sum_(self._output(o_NHD.flatten(1)), self._backend)


def turn_(heads_NHD: torch.Tensor, cos_N1P: torch.Tensor, sin_N1P: torch.Tensor) -> None:
    """Rotates pairs (i, i + D / 2) in place, computing in float32."""
    first, second = heads_NHD.float().chunk(2, dim=-1)
    heads_NHD.copy_(torch.cat((first * cos_N1P - second * sin_N1P, second * cos_N1P + first * sin_N1P), dim=-1))


class TowerMlp:
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) if there is a gate. names: gate if there is one, up and
    down."""

    def __init__(
        self,
        shape: TowerShape,
        names: tuple[str, ...],
        activation: Activation | None,
        reader: WeightReader,
        backend: Backend,
        ranks: Ranks,
    ) -> None:
        """activation: None: there is a gate."""
        self._activation, self._backend, self._ranks = activation, backend, ranks
        part = backend.shard.of(shape.intermediate_size, "intermediate size of the vision tower")
        self._up = load_linear(
            reader, names[:-1], bias=True, backend=backend, gated=activation is None, outputs=lambda name: part
        )
        self._down = load_linear(reader, names[-1:], bias=True, backend=backend, inputs=part)

    @property
    def num_bytes(self) -> int:
        return self._up.num_bytes + self._down.num_bytes

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Returns [N, E]. x_NE: normed."""
        return self._ranks.sum_(through(self._up, self._activation, self._down, x_NE), self._backend)


def through(up: PackedLinear, activation: Activation | None, down: PackedLinear, x_NI: torch.Tensor) -> torch.Tensor:
    """Returns down(activation(up(x))), computed some rows at a time."""
    out = torch.empty(len(x_NI), down.num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    for first in range(0, len(x_NI), _ROWS):
        hidden_NF = up(x_NI[first : first + _ROWS])
        if activation is not None:
            hidden_NF = activation(hidden_NF.float()).to(x_NI.dtype)
        out[first : first + _ROWS] = down(hidden_NF)
    return out


class TowerBlock:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, norms: tuple[TowerNorm, TowerNorm], attention: TowerAttention, mlp: TowerMlp) -> None:
        self._norms, self._attention, self._mlp = norms, attention, mlp

    @property
    def num_bytes(self) -> int:
        return self._attention.num_bytes + self._mlp.num_bytes

    def add_to_(
        self,
        x_NE: torch.Tensor,
        attention: PackedAttention,
        cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Changes the stream, float32, in place."""
        x_NE += self._attention(self._norms[0](x_NE), attention, cos_sin)
        x_NE += self._mlp(self._norms[1](x_NE))


def mlp_shapes(prefix: str, shape: TowerShape, up: tuple[str, ...], down: str) -> dict[str, Shape]:
    """Returns the shapes of an MLP's tensors. up: gate and up, or up alone."""
    linears = dict.fromkeys(up, (shape.width, shape.intermediate_size))
    linears[down] = shape.intermediate_size, shape.width
    return linear_shapes(prefix, linears, bias=tuple(linears))


def attention_shapes(prefix: str, shape: TowerShape, names: tuple[str, ...]) -> dict[str, Shape]:
    linears = dict.fromkeys(names, (shape.width, shape.width))
    return linear_shapes(prefix, linears, bias=names)
