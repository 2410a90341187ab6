"""How many KV blocks fit beside the weights on each GPU of a replica."""

from dataclasses import dataclass

from octavo.plan.errors import DoesNotFit
from octavo.plan.gpus import Gpu
from octavo.plan.model_shape import ModelShape

# Of each GPU: CUDA's context, captured graphs, what allocators keep; with several ranks NCCL's buffers too.
_FIXED_BYTES = 1.5e9
_COLLECTIVE_BYTES = 1.0e9
_ACTIVATION_BYTES = 2
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A replica's ranks, and what they hold a number in."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_value_bytes: float = 2.0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def layers_of_a_stage(self, model: ModelShape) -> int:
        """Of the longest one."""
        return -(-model.num_layers // self.pipeline_parallel_size)

    def kv_bytes_of_a_token(self, model: ModelShape) -> float:
        """In one layer on one rank. A KV head that is on several ranks is there whole; so is MLA's latent."""
        shards = min(self.tensor_parallel_size, model.num_kv_heads) or 1
        return model.kv_size / shards * self.kv_value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU of a replica, and the blocks that this leaves room for."""

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
    """min_tokens: what the KV cache must hold at least. Raises DoesNotFit, with the sizes."""
    tensor, stages = placement.tensor_parallel_size, placement.pipeline_parallel_size
    layers = placement.layers_of_a_stage(model)
    embeddings = model.embedding_params * model.embedding_param_bytes
    # The first stage has the embedding, the last one the head; one stage alone has both.
    matrices = 2 if stages == 1 and model.has_own_head else 1
    weights = model.stored_layer_params * model.layer_param_bytes * layers / model.num_layers / tensor
    weights += matrices * embeddings / tensor
    # Residual, its norm and projections, and the MLP's halves at once; logits are float32.
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
            cause = f"the {left / _GIB:.1f} GiB left hold no {min_tokens:,} tokens of KV"
        raise DoesNotFit(
            f"{model.name} does not fit on {gpu.name} with tensor_parallel_size={tensor}, "
            f"pipeline_parallel_size={stages}: each GPU needs {weights / _GIB:.1f} GiB for weights and "
            f"{work_space / _GIB:.1f} GiB for work space, and has {usable / _GIB:.1f} GiB "
            f"(gpu_memory_utilization={gpu_memory_utilization:g}), so {cause}; "
            "use more GPUs a replica, or smaller weights"
        )
    return Memory(weights=weights, work_space=work_space, kv_cache=num_blocks * block_bytes, num_blocks=num_blocks)
