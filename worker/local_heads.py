"""Which heads a rank computes."""

from kernels.paged_attention import HeadShape
from kernels.shard import Shard
from worker.model_config import ModelConfig


class LocalHeads:
    """A rank's heads and the KV heads that they read. If there are fewer KV heads than ranks, several ranks hold the
    same one."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """Raises ValueError, naming the option, for sizes that don't fit."""
        num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, shard.size
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            valid = [
                each
                for each in range(1, num_heads + 1)
                if num_heads % each == 0 and (num_kv_heads % each == 0 or each % num_kv_heads == 0)
            ]
            raise ValueError(
                f"tensor_parallel_size={size} does not fit {num_heads} heads on {num_kv_heads} KV heads; "
                f"{', '.join(map(str, valid))} do"
            )
        self.head_size = config.head_size
        self.heads = shard.of(num_heads, "num_attention_heads")
        first_kv_head = shard.rank * num_kv_heads // size
        self.kv_heads = slice(first_kv_head, first_kv_head + max(1, num_kv_heads // size))

    @property
    def shape(self) -> HeadShape:
        return HeadShape(
            num_heads=self.heads.stop - self.heads.start,
            num_kv_heads=self.kv_heads.stop - self.kv_heads.start,
            head_size=self.head_size,
        )

    def rows_of(self, projection: str) -> slice:
        """Outputs of q, k or v that are this rank's; of q also inputs of the output projection."""
        heads = self.heads if projection == "q" else self.kv_heads
        return slice(heads.start * self.head_size, heads.stop * self.head_size)
