"""A replica on GPUs, from data sheets and the model's shape: the KV blocks that fit, and the cost of a step by the
roofline of weights, KV and FLOPs.

Each part takes the longer of its reads and its arithmetic. The factors below are the shares of data-sheet rates that
good kernels reach: on an H200, measured GEMMs reach 80% of the bf16 rate (8192^3) and copies 90% of the bandwidth
(large buffers); those of a step are smaller. Paged decode attention is published at 54 to 69% of peak bandwidth, and
prefill attention at 400 to 740 of 989 TFLOP/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.lab.errors import DoesNotFit
from octavo.plan.costs.hardware import Gpu, Interconnect
from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.costs.step_shape import StepShape

# Per GPU: CUDA's context, captured graphs and allocator caches; with several ranks, NCCL's buffers too.
_FIXED_BYTES = 1.5e9
_COLLECTIVE_BYTES = 1.0e9
_ACTIVATION_BYTES = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A replica's ranks, and the bytes per value of their KV."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_value_bytes: float = 2.0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def layers_of_a_stage(self, model: ModelShape) -> int:
        """Layers of the longest stage."""
        return -(-model.num_layers // self.pipeline_parallel_size)

    def kv_bytes_of_a_token(self, model: ModelShape) -> float:
        """Bytes in one layer on one rank. A KV head on several ranks is stored whole on each; so is MLA's latent."""
        shards = min(self.tensor_parallel_size, model.num_kv_heads) or 1
        return model.kv_size / shards * self.kv_value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU of a replica, and the KV blocks that fit."""

    weights: float
    work_space: float
    kv_cache: float
    num_blocks: int


def fit_memory(
    model: ModelShape,
    gpu: Gpu,
    placement: Placement,
    *,
    gpu_memory_utilization: float,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    min_tokens: int = 1,
) -> Memory:
    """Divides a GPU's memory. min_tokens: tokens that the KV cache must hold. Raises DoesNotFit, with the sizes."""
    tensor, stages = placement.tensor_parallel_size, placement.pipeline_parallel_size
    layers = placement.layers_of_a_stage(model)
    embeddings = model.embedding_params * model.embedding_param_bytes
    # The first stage has the embedding and the last one the head; a single stage has both.
    matrices = 2 if stages == 1 and model.has_own_head else 1
    weights = model.stored_layer_params * model.layer_param_bytes * layers / model.num_layers / tensor
    weights += matrices * embeddings / tensor
    # Live at once: residual, its norm and projections, and the MLP's halves. Logits are float32.
    width = 4 * model.hidden_size + max(model.mlp_params, model.dense_mlp_params) / model.hidden_size / tensor
    work_space = max_num_batched_tokens * width * _ACTIVATION_BYTES + max_num_seqs * model.vocab_size * 4
    work_space += _FIXED_BYTES + (_COLLECTIVE_BYTES if placement.world_size > 1 else 0.0)
    usable = gpu.memory * gpu_memory_utilization
    block_bytes = placement.kv_bytes_of_a_token(model) * layers * block_size
    num_blocks = int((usable - weights - work_space) // block_bytes)
    if num_blocks * block_size < min_tokens:
        left = usable - weights - work_space
        cause = f"{-left / _GIB:.1f} GiB are missing"
        if left > 0:
            cause = f"the {left / _GIB:.1f} GiB left cannot hold the KV of {min_tokens:,} tokens"
        raise DoesNotFit(
            f"{model.name} does not fit on {gpu.name} with tensor_parallel_size={tensor}, "
            f"pipeline_parallel_size={stages}: each GPU needs {weights / _GIB:.1f} GiB for weights and "
            f"{work_space / _GIB:.1f} GiB for work space, and has {usable / _GIB:.1f} GiB "
            f"(gpu_memory_utilization={gpu_memory_utilization:g}), so {cause}; "
            "use more GPUs per replica, or smaller weights"
        )
    return Memory(weights=weights, work_space=work_space, kv_cache=num_blocks * block_bytes, num_blocks=num_blocks)


_GEMM_FLOPS, _WEIGHT_BANDWIDTH = 0.7, 0.85
_ATTENTION_FLOPS, _KV_BANDWIDTH = 0.5, 0.6
_PCIE_BANDWIDTH = 0.8
# Seconds between two kernels of a captured graph, times about ten kernels per layer; a step's start and sampling.
_LAYER_OVERHEAD, _STEP_OVERHEAD = 10 * 1.5e-6, 200e-6
# Planning, encoding and sending a step, and applying its result.
_HOST_SECONDS = 400e-6
_HIDDEN_BYTES = 2

WEIGHTS, FLOPS, KV, ALL_REDUCE, STAGES, SWAP, LAUNCH = (
    "weights read",
    "FLOPs",
    "KV read",
    "all-reduce",
    "between stages",
    "swap",
    "launches",
)


class Roofline:
    """A `CostModel`. Assumes that every stage is as slow as the slowest one, the last, which has the head."""

    parts = (WEIGHTS, FLOPS, KV, ALL_REDUCE, STAGES, SWAP, LAUNCH)
    host_seconds = _HOST_SECONDS

    def __init__(
        self, *, model: ModelShape, gpu: Gpu, placement: Placement, interconnect: Interconnect, block_size: int
    ) -> None:
        tensor, layers = placement.tensor_parallel_size, placement.layers_of_a_stage(model)
        self._model, self._layers, self._tensor = model, layers, tensor
        self.num_stages = placement.pipeline_parallel_size
        self._link, self._stage_link = interconnect.link_of(tensor), interconnect.link_of(placement.world_size)
        self._num_window_layers = layers * model.num_window_layers / model.num_layers
        # Everything below is in seconds per unit, on one rank of one stage.
        share = layers / model.num_layers / tensor
        bandwidth, bf16 = gpu.bandwidth * _WEIGHT_BANDWIDTH, gpu.bf16_flops * _GEMM_FLOPS
        has_fp8 = model.layer_param_bytes == 1.0 and gpu.fp8_flops is not None
        flops = (gpu.fp8_flops or 0.0) * _GEMM_FLOPS if has_fp8 else bf16
        self._param_read = model.layer_param_bytes * share / bandwidth
        self._token_multiply = 2 * model.active_layer_params * share / flops
        self._head_read = model.embedding_params * model.embedding_param_bytes / tensor / bandwidth
        self._row_multiply = 2 * model.embedding_params / tensor / bf16
        kv_bytes = placement.kv_bytes_of_a_token(model)
        self._kv_read = kv_bytes / (gpu.bandwidth * _KV_BANDWIDTH)
        self._pair_multiply = 2 * model.pair_macs / tensor / (gpu.bf16_flops * _ATTENTION_FLOPS)
        self._block_copy = block_size * kv_bytes * layers / (gpu.pcie * _PCIE_BANDWIDTH)
        self._launch = _STEP_OVERHEAD + layers * _LAYER_OVERHEAD

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        num_tokens = shape.num_tokens
        weights, flops = _longer(
            self._param_read * self._model.touched_layer_params(num_tokens), self._token_multiply * num_tokens
        )
        head = (0.0, 0.0)
        if shape.num_sampled:
            head = _longer(self._head_read, self._row_multiply * shape.num_sampled)
        # Decodes only read; chunks read or multiply, whichever takes longer.
        kv = self._kv_read * self._over_layers(shape.decode_context, shape.decode_context, shape.num_decodes)
        chunk_kv = attention = 0.0
        if shape.num_chunks:
            chunk_kv, attention = _longer(
                self._kv_read * self._over_layers(shape.chunk_context, shape.chunk_context, shape.num_chunks),
                self._pair_multiply * self._over_layers(shape.attention_pairs, shape.chunk_context, shape.num_chunks),
            )
        hidden_bytes = num_tokens * self._model.hidden_size * _HIDDEN_BYTES
        return (
            weights + head[0],
            flops + head[1] + attention,
            kv + chunk_kv,
            # After attention and after the MLP.
            2 * self._layers * self._link.all_reduce_seconds(hidden_bytes, self._tensor),
            self._stage_link.send_seconds(hidden_bytes / self._tensor) if self.num_stages > 1 else 0.0,
            self._block_copy * shape.num_swapped_blocks,
            self._launch,
        )

    def _over_layers(self, amount: float, context: int, num_rows: int) -> float:
        """`amount` summed over the layers; layers with a window see only a part of the mean context."""
        if not self._num_window_layers or not num_rows:
            return amount * self._layers
        seen = min(1.0, self._model.window / (context / num_rows))
        return amount * (self._layers - self._num_window_layers * (1 - seen))


def _longer(reading: float, multiplying: float) -> tuple[float, float]:
    """Keeps the longer of the two; the other overlaps with it and becomes 0."""
    return (reading, 0.0) if reading >= multiplying else (0.0, multiplying)
