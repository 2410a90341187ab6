"""A layer that carries a state from token to token: input projection, recurrence, output projection.

Legend: T tokens, E hidden size, F numbers of the recurrence's input, O of its result.
"""

from kernels.attention.recurrent import RecurrentLayer, RecurrentWeights
from kernels.backend import Backend
from kernels.linear import PackedLinear
from worker.layers.forward_context import current
from worker.layers.residual import InputNorm, Layer, LayerInput, LayerOutput, nothing, stream_for
from worker.model_config import ModelConfig


class Mixer(Layer):
    """Takes the place of attention. Each rank has some of the heads, with their states."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        norm: InputNorm,
        inputs: PackedLinear,
        output: PackedLinear,
        weights: RecurrentWeights,
        backend: Backend,
    ) -> None:
        """norm: the one that the layer's input comes from. inputs: norms and projects it; its outputs are in the order
        of kernels.attention.recurrent."""
        assert config.recurrence is not None
        shape = config.recurrence.shape_of(backend.shard)
        assert inputs.num_outputs == shape.width
        self._layer, self._norm, self._inputs, self._output = layer, norm, inputs, output
        self._recurrence = RecurrentLayer(shape, weights, backend)

    @property
    def weight_bytes(self) -> int:
        return self._inputs.num_bytes + self._output.num_bytes

    def __call__(self, h: LayerInput, /) -> LayerOutput:
        """Advances the states of the step's rows."""
        if not len(h):
            return nothing()
        context, num_tokens = current(), len(h)
        assert context.recurrent_step is not None
        take, inputs = context.workspace.take, stream_for(h, self._norm)
        x_TF = self._inputs(inputs, out=take("recurrent inputs", num_tokens, self._inputs.num_outputs))
        cache = context.kv_cache.of_layer(self._layer)
        result_TO = self._recurrence(x_TF, cache, context.recurrent_step, take)
        return LayerOutput(lambda into_TE: self._output.add_to_(into_TE, result_TO))
