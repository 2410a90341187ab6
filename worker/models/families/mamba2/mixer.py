"""A layer that carries a state from token to token: input projection, recurrence, output projection.

Legend: T tokens, E hidden size, F numbers of the recurrence's input, O of its result.
"""

from kernels.attention.recurrent import RecurrentLayer, RecurrentWeights
from kernels.backend import Backend
from kernels.linear import PackedLinear, Stream
from worker.layers.forward_context import current
from worker.layers.residual import add_sum_of_ranks_
from worker.model_config import ModelConfig


class Mixer:
    """Takes the place of attention. Each rank has some of the heads, with their states."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        inputs: PackedLinear,
        output: PackedLinear,
        weights: RecurrentWeights,
        backend: Backend,
    ) -> None:
        """inputs: norms and projects the stream; its outputs are in the order of kernels.attention.recurrent."""
        assert config.recurrence is not None
        shape = config.recurrence.shape_of(backend.shard)
        assert inputs.num_outputs == shape.width
        self._layer, self._inputs, self._output = layer, inputs, output
        self._recurrence = RecurrentLayer(shape, weights, backend)

    @property
    def weight_bytes(self) -> int:
        return self._inputs.num_bytes + self._output.num_bytes

    def add_to_(self, x_TE: Stream) -> None:
        """Adds the layer's result to the residual stream, in place, and advances the states of the step's rows."""
        if not len(x_TE):
            return
        context, num_tokens = current(), len(x_TE)
        assert context.recurrent_step is not None
        take = context.workspace.take
        x_TF = self._inputs(x_TE, out=take("recurrent inputs", num_tokens, self._inputs.num_outputs))
        cache = context.kv_cache.of_layer(self._layer)
        result_TO = self._recurrence(x_TF, cache, context.recurrent_step, take)
        add_sum_of_ranks_(x_TE, lambda part_TE: self._output.add_to_(part_TE, result_TO))
