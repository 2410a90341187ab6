"""What to say when a GPU has no memory left: which option to lower, and to what."""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from configs.options import Options
from worker.errors import PermanentError, StepError, WorkerError
from worker.gpu.device import DeviceMemory
from worker.gpu.memory.use import MemoryUse, gib, scaled_down


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
