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
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = option(
        CACHE,
        "auto",
        "Type of the KV cache. auto: as dtype. fp8_e4m3 (fp8 is the same): half of the memory, with the checkpoint's "
        "scales, or 1.",
    )
    kv_cache_memory: float = option(
        CACHE,
        1.0,
        "GiB of host memory for the KV cache of each CPU worker; for GPUs see gpu_memory_utilization.",
        gt=0,
        le=4096,
    )
    populate_kv_cache: bool = option(
        CACHE,
        False,
        "Allocate all KV memory of a CPU worker right after its start, in a thread beside the first steps. Else the "
        "system allocates and zeroes each part when a step first writes it, which slows down prompts until all blocks "
        "have been used once, and memory that is never used costs nothing.",
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

    kv_events_endpoint: str = option(
        CACHE,
        "",
        "ZeroMQ endpoint at which each scheduler publishes which blocks its prefix cache holds, in vLLM's layout, for "
        "outside routers: tcp://HOST:PORT (replica N takes port PORT + N) or ipc://PATH (replica N: PATH-N). Events "
        "hold token ids of prompts. Empty: off.",
    )
    kv_events_replay_endpoint: str = option(
        CACHE,
        "",
        "ZeroMQ endpoint at which subscribers of kv_events_endpoint ask for messages that they lack; ports and paths "
        "count up in the same way. Empty: none.",
    )
    kv_events_topic: str = option(CACHE, "", "Topic of the messages at kv_events_endpoint.", max_length=256)
    kv_events_buffer_steps: int = option(
        CACHE,
        10_000,
        "Batches of KV events that each scheduler keeps for kv_events_replay_endpoint.",
        ge=1,
        le=10**6,
    )

    def kv_events_endpoints(self, replica: int) -> tuple[str, str]:
        """Where a replica publishes its KV events, and where it replays them; empty if it does not."""
        return _of_replica(self.kv_events_endpoint, replica), _of_replica(self.kv_events_replay_endpoint, replica)

    def _check_kv_events(self, num_replicas: int) -> None:
        """Raises ValueError."""
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint: str = getattr(self, name)
            if not endpoint:
                continue
            port = endpoint.rpartition(":")[2]
            is_port = port.isdecimal() and 1 <= int(port) <= 65_536 - num_replicas
            if not (endpoint.startswith("ipc://") or (endpoint.startswith("tcp://") and is_port)):
                raise ValueError(
                    f"{name}={endpoint!r}: give ipc://PATH, or tcp://HOST:PORT with a port from 1 to "
                    f"{65_536 - num_replicas}"
                )
        if self.kv_events_replay_endpoint and not self.kv_events_endpoint:
            raise ValueError(
                f"kv_events_replay_endpoint={self.kv_events_replay_endpoint!r} needs kv_events_endpoint, whose "
                f"messages it replays"
            )
        taken = [each for replica in range(num_replicas) for each in self.kv_events_endpoints(replica) if each]
        if len(set(taken)) < len(taken):
            raise ValueError(
                f"kv_events_replay_endpoint={self.kv_events_replay_endpoint!r}: {num_replicas} replicas take as many "
                f"ports from there and from kv_events_endpoint={self.kv_events_endpoint!r}: leave room between them"
            )


def _of_replica(endpoint: str, replica: int) -> str:
    if not endpoint or not replica:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{replica}"
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + replica}"
