"""The gated MLP.

Legend: T tokens, E hidden size, F intermediate size.
"""

from functools import partial

from kernels.backend import Backend
from kernels.linear import Stream
from worker.layers.forward_context import current
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.residual import InputNorm, Layer, LayerInput, LayerOutput, stream_for
from worker.model_config import ModelConfig
from worker.weights.reader import Shape, WeightReader


def gated_linears(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Returns the inputs and outputs of a gated MLP's layers, by name."""
    up = hidden_size, intermediate_size
    return {"gate_proj": up, "up_proj": up, "down_proj": (intermediate_size, hidden_size)}


class GatedMLP(Layer):
    """down(activation(gate(h)) * up(h)). prefix: of its tensors, such as model.layers.3.mlp. norm: the one that h comes
    from; None: there is none before the MLP."""

    def __init__(
        self, config: ModelConfig, prefix: str, norm: InputNorm | None, reader: WeightReader, backend: Backend
    ) -> None:
        self._norm = norm
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        part = backend.shard.of(config.intermediate_size, "intermediate_size")
        self._gate_up = load_linear(
            reader,
            names,
            bias=config.mlp_bias,
            backend=backend,
            norm=None if norm is None else norm.name,
            eps=config.rms_norm_eps,
            gated=True,
            activation=config.activation,
            outputs=lambda name: part,
        )
        self._down = load_linear(reader, [f"{prefix}.down_proj"], bias=config.mlp_bias, backend=backend, inputs=part)

    @staticmethod
    def shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
        """Returns the shapes of the tensors under the prefix, by name."""
        linears = gated_linears(config.hidden_size, config.intermediate_size)
        return linear_shapes(prefix, linears, bias=linears if config.mlp_bias else ())

    @property
    def weight_bytes(self) -> int:
        return self._gate_up.num_bytes + self._down.num_bytes

    def __call__(self, h: LayerInput, /) -> LayerOutput:
        return LayerOutput(partial(self._add_to_, h))

    def _add_to_(self, h: LayerInput, into: Stream) -> None:
        hidden = partial(current().workspace.take, "mlp", len(h), self._gate_up.num_outputs)
        self._gate_up.add_through_(self._down, stream_for(h, self._norm), hidden, into=into)
