"""The gated MLP.

Legend: T tokens, E hidden size, F intermediate size.
"""

from functools import partial

from kernels.backend import Backend
from kernels.linear import Stream
from worker.layers.forward_context import current
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.residual import AddedNorm, add_sum_of_ranks_, unnormed
from worker.model_config import ModelConfig
from worker.weights.reader import Shape, WeightReader


def gated_linears(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Returns the inputs and outputs of a gated MLP's layers, by name."""
    up = hidden_size, intermediate_size
    return {"gate_proj": up, "up_proj": up, "down_proj": (intermediate_size, hidden_size)}


class GatedMLP:
    """down(activation(gate(norm(x))) * up(norm(x))). prefix, norm: names of its tensors, such as model.layers.3.mlp and
    model.layers.3.post_attention_layernorm; norm is None if there is none before the MLP. added_norm: applied to the
    result before it is added."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        norm: str | None,
        reader: WeightReader,
        backend: Backend,
        *,
        added_norm: AddedNorm | None = None,
    ) -> None:
        self._has_norm, self._dtype, self._added_norm = norm is not None, backend.compute_dtype, added_norm
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        part = backend.shard.of(config.intermediate_size, "intermediate_size")
        self._gate_up = load_linear(
            reader,
            names,
            bias=config.mlp_bias,
            backend=backend,
            norm=norm,
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

    def add_to_(self, x_TE: Stream) -> None:
        """Adds the MLP's result for the residual stream to the stream, in place."""
        add_sum_of_ranks_(x_TE, partial(self._add_to_, x_TE), self._added_norm)

    def _add_to_(self, x_TE: Stream, into: Stream) -> None:
        take = current().workspace.take
        hidden = partial(take, "mlp", len(x_TE), self._gate_up.num_outputs)
        inputs = x_TE if self._has_norm else unnormed(x_TE, self._dtype)
        self._gate_up.add_through_(self._down, inputs, hidden, into=into)
