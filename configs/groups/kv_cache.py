"""Options of the KV cache: its blocks, its memory, and prefix caching."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from configs.groups.field import CACHE, as_number, option


class CacheOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    block_size: Annotated[Literal[8, 16, 32, 64, 128, 256, 512, 1024], BeforeValidator(as_number)] = option(
        CACHE,
        16,
        "Tokens per KV block; 64 and 128 on GPUs only. Models with layers that carry a state (Mamba-2, Qwen3-Next) "
        "take any size, and one that fits their states if none is given.",
    )
    kv_cache_memory: float = option(
        CACHE,
        1.0,
        "GiB of host memory for the KV cache of each CPU worker; for GPUs see gpu_memory_utilization.",
        gt=0,
        le=4096,
    )
    num_blocks_override: int = option(
        CACHE,
        0,
        "Number of KV blocks, in place of what kv_cache_memory or gpu_memory_utilization gives; to test preemption. 0: "
        "off.",
        ge=0,
        le=2**31 - 1,
    )
    enable_prefix_caching: bool = option(
        CACHE, True, "Keep the KV blocks of finished requests and reuse them for equal prefixes."
    )
