"""How a GPU's memory is shared out: weights, a step's intermediate results, graphs; all that is left to KV blocks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from configs.options import Options
from protos import inference_pb2
from worker.errors import PermanentError
from worker.gpu.device import Device

# Utilizations above it leave drivers and other processes nothing to grow into.
_HIGHEST_UTILIZATION = 0.98
# What should have room at least, if nobody says how long a sequence may be.
_USEFUL_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a GPU that are taken before there is a KV cache."""

    total: int
    # What no tensor of this process takes: its driver state and kernels, and all other processes.
    others: int
    weights: int
    # The most that a step takes beyond the weights: what stays in place for all steps, and what comes and goes.
    step: int
    graphs: int = 0
    # What NCCL will take when the ranks have met.
    nccl: int = 0

    @property
    def taken(self) -> int:
        return self.others + self.weights + self.step + self.graphs + self.nccl

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache; below 0, so many are lacking."""
        return int(self.total * utilization) - self.taken

    def utilization_for(self, kv_bytes: int) -> float:
        """The least gpu_memory_utilization, of two decimals, that leaves so much for the KV cache."""
        return math.ceil(100 * (self.taken + kv_bytes) / self.total) / 100


def num_kv_blocks(use: MemoryUse, options: Options, block_bytes: int) -> int:
    """Blocks that can be given out: what gpu_memory_utilization leaves, less the null block, or num_blocks_override.

    Raises PermanentError, with the options that would make room, if that is none, or too few for max_model_len.
    """
    if options.num_blocks_override:
        return options.num_blocks_override
    num_blocks = use.left(options.gpu_memory_utilization) // block_bytes - 1
    if num_blocks < max(1, -(-options.max_model_len // options.block_size)):
        raise PermanentError(_no_room(use, options, num_blocks, block_bytes))
    return num_blocks


def _no_room(use: MemoryUse, options: Options, num_blocks: int, block_bytes: int) -> str:
    share, held = options.gpu_memory_utilization, num_blocks * options.block_size
    wanted = (-(-(options.max_model_len or _USEFUL_TOKENS) // options.block_size) + 1) * block_bytes
    lacking = wanted - use.left(share)
    ways: list[str] = []
    if (enough := use.utilization_for(wanted)) <= _HIGHEST_UTILIZATION:
        ways.append(f"gpu_memory_utilization={enough:.2f} or above")
    if held >= 2:
        ways.append(f"max_model_len={held} or less")
    if use.step > lacking:
        fewer = scaled_down(options.max_num_batched_tokens, use.step - lacking, use.step)
        ways.append(f"max_num_batched_tokens={fewer}")
    if use.graphs > lacking:
        ways.append("enforce_eager=true")
    if use.weights > 2 * lacking and options.quantization in ("auto", "none"):
        ways.append("quantization=fp8")
    nccl = f", NCCL {gib(use.nccl)}" if use.nccl else ""
    use_these = f"use {', or '.join(ways)}" if ways else "this model needs a GPU with more memory"
    leaves = f"{gib(max(0, use.left(share)))} GiB for the KV cache"
    if options.max_model_len:
        leaves += f", and max_model_len={options.max_model_len} needs {gib(wanted)}"
    return (
        f"gpu_memory_utilization={share:g} gives this worker {gib(use.total * share)} of the GPU's {gib(use.total)} "
        f"GiB, which leaves {leaves}: weights take {gib(use.weights)}, a step {gib(use.step)}, CUDA graphs "
        f"{gib(use.graphs)}{nccl}, the driver and other processes {gib(use.others)}; {use_these}"
    )


def scaled_down(value: int, there: float, needed: float) -> int:
    """What of `value` fits into `there` if all of it needs `needed`; a multiple of 64 from there on, at least 1."""
    fitting = int(value * there / needed)
    return max(1, fitting - fitting % 64 if fitting >= 64 else fitting)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def measure_use(device: Device, step: Callable[[], None], *, weights: int, kv_bytes: int = 0) -> MemoryUse:
    """What is taken while `step`, a worst case, is computed; without graphs. A smaller one has run before.

    weights: bytes. kv_bytes: of the KV cache that is there for this alone.
    """
    before = device.memory().allocated
    peak = before + device.peak_bytes(step)
    now = device.memory()
    return MemoryUse(
        total=now.total,
        others=now.total - now.free - now.reserved,
        weights=weights,
        step=max(0, peak - weights - kv_bytes),
    )


def account(use: MemoryUse, options: Options, info: inference_pb2.ModelInfo, block_bytes: int) -> str:
    """Where the GPU's memory is, for the log."""
    share, kv_bytes = options.gpu_memory_utilization, (info.num_blocks + 1) * block_bytes
    num_tokens = info.num_blocks * info.block_size
    num_sequences = num_tokens / info.max_model_len
    nccl = f"NCCL {gib(use.nccl)}, " if use.nccl else ""
    return (
        f"GPU memory: {gib(use.total)} GiB, of which gpu_memory_utilization={share:g} gives {gib(use.total * share)}: "
        f"weights {gib(use.weights)}, a step's peak {gib(use.step)}, CUDA graphs {gib(use.graphs)}, {nccl}the driver "
        f"and other processes {gib(use.others)}, KV cache {gib(kv_bytes)} ({info.num_blocks} blocks, {num_tokens} "
        f"tokens: {num_sequences:.1f} sequences of max_model_len={info.max_model_len} at once)"
    )
