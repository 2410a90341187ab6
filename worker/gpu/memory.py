"""Shares out a GPU's memory (weights, a step, graphs, KV blocks), and says which option to lower if it is short."""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from configs.options import Options
from protos import inference_pb2
from worker.device.device import Device, DeviceMemory
from worker.errors import PermanentError, StepError, WorkerError

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU had no memory for what was asked: of torch's allocator, or of CUDA itself, by whose own calls
    kernels are loaded, graphs instantiated and cuBLAS begun."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text):
        return True
    # The end of a capture that failed may fail for that.
    return error.__context__ is not None and is_out_of_memory(error.__context__)


@contextmanager
def out_of_memory(become: Callable[[], WorkerError]) -> Iterator[None]:
    """Raises what `become` makes in place of such an error. It is called when what was half made is gone, so that it
    sees what there really is."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__context__
        raise become() from error


def weights_need_more(options: Options, memory: DeviceMemory, *, needed: int, as_fp8: int) -> PermanentError:
    """needed: bytes of all weights; as_fp8: with quantization=fp8."""
    ways = []
    if as_fp8 < min(needed, memory.total * options.gpu_memory_utilization):
        ways.append(f"quantization=fp8, which needs {gib(as_fp8)}")
    if memory.free < memory.total * options.gpu_memory_utilization:
        ways.append(f"end what else runs on this GPU, which holds {gib(memory.total - memory.free)}")
    ways.append(f"a GPU with more than {gib(needed / options.gpu_memory_utilization)} GiB")
    return PermanentError(
        f"out of GPU memory while loading the weights: they need {gib(needed)} GiB, and {gib(memory.free)} of "
        f"{gib(memory.total)} GiB are free; use {', or '.join(ways)}"
    )


def step_needs_more(options: Options, memory: DeviceMemory, *, part: int, needed_by_part: int) -> PermanentError:
    """needed_by_part: bytes of a step of a `part`-th of the tokens and rows, which fitted; memory: without a step."""
    needed = part * needed_by_part
    # Something must be left for the KV cache.
    there = min(memory.free * 0.9, needed / 2)
    tokens = scaled_down(options.max_num_batched_tokens, there, needed)
    rows = scaled_down(options.max_num_seqs, there, needed)
    return PermanentError(
        f"out of GPU memory in a step of max_num_batched_tokens={options.max_num_batched_tokens} and "
        f"max_num_seqs={options.max_num_seqs}: 1/{part} of both took {gib(needed_by_part)} GiB, and beside the weights "
        f"{gib(memory.free)} of {gib(memory.total)} GiB are free; use max_num_batched_tokens={tokens}, and "
        f"max_num_seqs={rows} if that is not enough"
    )


def cache_needs_more(
    options: Options, memory: DeviceMemory, use: MemoryUse, *, num_blocks: int, block_bytes: int, free_before: int
) -> PermanentError:
    """use: as measured. num_blocks: with the null block. free_before: bytes, when the number of blocks was found."""
    wanted = num_blocks * block_bytes
    said = f"out of GPU memory: a KV cache of {gib(wanted)} GiB, and {gib(memory.free)} of {gib(memory.total)} are free"
    # What comes after the cache.
    there = memory.free - use.step - use.graphs
    if options.num_blocks_override:
        fitting = max(0, there // block_bytes - 1)
        return PermanentError(f"{said}; num_blocks_override={options.num_blocks_override}: use {fitting} or less")
    lost = f" ({gib(free_before - memory.free)} less than a moment ago)" if memory.free < free_before else ""
    lower = _lower_utilization(options, wanted - there, memory.total)
    return PermanentError(
        f"{said}{lost}: others use this GPU, too; start with gpu_memory_utilization={lower:.2f} instead of "
        f"{options.gpu_memory_utilization:g}"
    )


def graphs_need_more(options: Options, memory: DeviceMemory, sizes: Sequence[int]) -> PermanentError:
    """sizes: that were to be captured, ascending. memory: with what was captured before it failed."""
    lower = _lower_utilization(options, memory.total // 50, memory.total)
    # The memory of the largest serves all others, too.
    smaller = [size for size in sizes if size <= sizes[-1] // 2]
    fewer = f'compilation_config={{"cudagraph_capture_sizes": {smaller}}}, or ' if smaller else ""
    return PermanentError(
        f"out of GPU memory while CUDA graphs of {len(sizes)} sizes up to {sizes[-1]} were captured: "
        f"{gib(memory.free)} of {gib(memory.total)} GiB are free; use {fewer}gpu_memory_utilization={lower:.2f}, or "
        "enforce_eager=true"
    )


def start_needs_more(options: Options, memory: DeviceMemory, use: MemoryUse) -> PermanentError:
    """When there is a KV cache, and all else was measured. use: as it was then."""
    return PermanentError(_crowded(options, memory, use))


def serving_needs_more(options: Options, memory: DeviceMemory, use: MemoryUse) -> StepError:
    """In a step of requests. use: as measured at the start."""
    return StepError(_crowded(options, memory, use))


def _crowded(options: Options, memory: DeviceMemory, use: MemoryUse) -> str:
    others = memory.total - memory.free - memory.reserved
    lower = _lower_utilization(options, others - use.others, memory.total)
    return (
        f"out of GPU memory: this worker holds {gib(memory.reserved)} of {gib(memory.total)} GiB, the driver and other "
        f"processes {gib(others)} (when memory was measured {gib(use.others)}), {gib(memory.free)} are free; others "
        f"use this GPU, too: start with gpu_memory_utilization={lower:.2f} instead of "
        f"{options.gpu_memory_utilization:g}"
    )


def _lower_utilization(options: Options, lacking: int, total: int) -> float:
    """Of two decimals, lower by what is lacking, and at least by 0.02."""
    lower = options.gpu_memory_utilization - max(lacking / total, 0.01)
    return max(0.01, math.floor(100 * lower) / 100)
