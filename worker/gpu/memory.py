"""Divides a GPU's memory (weights, a step, graphs, KV blocks), and says which option to lower if it is short."""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from configs.options import Options
from protos import inference_pb2
from worker.device.device import Device, DeviceMemory
from worker.encoders.sizes import ItemSizes
from worker.errors import PermanentError, StepError, WorkerError

# Higher utilizations leave no room for drivers and other processes to grow.
_HIGHEST_UTILIZATION = 0.98
# The KV cache should have room for this many tokens if max_model_len is not set.
_USEFUL_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a GPU that are taken before there is a KV cache."""

    total: int
    # Memory outside this process's tensors: its driver state and kernels, and all other processes.
    others: int
    weights: int
    # The peak of a step beyond the weights: memory kept for all steps, and temporary memory.
    step: int
    graphs: int = 0
    # Memory that NCCL will take once the ranks are connected.
    nccl: int = 0

    @property
    def taken(self) -> int:
        return self.others + self.weights + self.step + self.graphs + self.nccl

    def left(self, utilization: float) -> int:
        """Bytes left for the KV cache; negative if memory is short."""
        return int(self.total * utilization) - self.taken

    def utilization_for(self, kv_bytes: int) -> float:
        """The least gpu_memory_utilization, with two decimals, that leaves kv_bytes for the KV cache."""
        return math.ceil(100 * (self.taken + kv_bytes) / self.total) / 100


def num_kv_blocks(use: MemoryUse, options: Options, block_bytes: int) -> int:
    """Returns the number of blocks that can be allocated: num_blocks_override, or as many as gpu_memory_utilization
    leaves room for, less the null block.

    Raises PermanentError, with the options that would make room, if that is 0, or too few for max_model_len.
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
    """Scales `value`, which needs `needed`, down to fit into `there`. At least 1; from 64 on a multiple of 64."""
    fitting = int(value * there / needed)
    return max(1, fitting - fitting % 64 if fitting >= 64 else fitting)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def measure_use(device: Device, step: Callable[[], None], *, weights: int, kv_bytes: int = 0) -> MemoryUse:
    """Measures memory use while `step`, a worst case, is computed; without graphs. A smaller step must have run before.

    weights: bytes. kv_bytes: bytes of the temporary KV cache of this measurement.
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
    """Describes the use of the GPU's memory, for the log."""
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
    """Returns True if the GPU ran out of memory: in torch's allocator, or in CUDA calls that load kernels, instantiate
    graphs or start cuBLAS."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text):
        return True
    # If memory runs out during a capture, ending the capture raises another error on top.
    return error.__context__ is not None and is_out_of_memory(error.__context__)


@contextmanager
def out_of_memory(become: Callable[[], WorkerError]) -> Iterator[None]:
    """Replaces out-of-memory errors by the error that `become` returns. Memory of the failed work is released first, so
    `become` sees how much is really free."""
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
    """Makes the error for weights that do not fit. needed: bytes of all weights; as_fp8: with quantization=fp8."""
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
    """Makes the error for a worst-case step that does not fit. needed_by_part: bytes of a step of a `part`-th of the
    tokens and rows, which did fit. memory: without a step."""
    needed = part * needed_by_part
    # 10 % of the free memory must remain for the KV cache.
    there = min(memory.free * 0.9, needed / 2)
    tokens = scaled_down(options.max_num_batched_tokens, there, needed)
    rows = scaled_down(options.max_num_seqs, there, needed)
    return PermanentError(
        f"out of GPU memory in a step of max_num_batched_tokens={options.max_num_batched_tokens} and "
        f"max_num_seqs={options.max_num_seqs}: 1/{part} of both took {gib(needed_by_part)} GiB, and beside the weights "
        f"{gib(memory.free)} of {gib(memory.total)} GiB are free; use max_num_batched_tokens={tokens}, and "
        f"max_num_seqs={rows} if that is not enough"
    )


def items_need_more(options: Options, memory: DeviceMemory, sizes: ItemSizes) -> PermanentError:
    """Makes the error for images and videos that do not fit."""
    return PermanentError(
        f"out of GPU memory: limit_mm_per_prompt allows {sizes.description}, whose encoding does not fit into the "
        f"{gib(memory.free)} of {gib(memory.total)} GiB that are free beside encoder_cache_size={sizes.cache_size} "
        f"({gib(sizes.cache_bytes)}); use a lower limit_mm_per_prompt, such as "
        f'{{"image": {{"count": 1, "width": 640, "height": 480}}, "video": 0}}, or mm_processor_kwargs with lower '
        f"max_pixels"
    )


def cache_needs_more(
    options: Options, memory: DeviceMemory, use: MemoryUse, *, num_blocks: int, block_bytes: int, free_before: int
) -> PermanentError:
    """Makes the error for a KV cache that does not fit. use: as measured. num_blocks: including the null block.
    free_before: bytes that were free before the allocation."""
    wanted = num_blocks * block_bytes
    lack = (
        f"out of GPU memory: the KV cache needs {gib(wanted)} GiB, and {gib(memory.free)} of {gib(memory.total)} are "
        f"free"
    )
    # Leaves room for steps and graphs, which are allocated after the cache.
    there = memory.free - use.step - use.graphs
    if options.num_blocks_override:
        fitting = max(0, there // block_bytes - 1)
        return PermanentError(f"{lack}; num_blocks_override={options.num_blocks_override}: use {fitting} or less")
    lost = f" ({gib(free_before - memory.free)} less than a moment ago)" if memory.free < free_before else ""
    lower = _lower_utilization(options, wanted - there, memory.total)
    return PermanentError(
        f"{lack}{lost}: other processes use this GPU, too; start with gpu_memory_utilization={lower:.2f} instead of "
        f"{options.gpu_memory_utilization:g}"
    )


def graphs_need_more(options: Options, memory: DeviceMemory, sizes: Sequence[int]) -> PermanentError:
    """Makes the error for graphs that do not fit. sizes: the sizes to capture, ascending. memory: at the failure, with
    the graphs captured before it."""
    lower = _lower_utilization(options, memory.total // 50, memory.total)
    # Smaller graphs reuse the memory of the largest, so dropping the largest sizes helps.
    smaller = [size for size in sizes if size <= sizes[-1] // 2]
    fewer = f'compilation_config={{"cudagraph_capture_sizes": {smaller}}}, or ' if smaller else ""
    return PermanentError(
        f"out of GPU memory while CUDA graphs of {len(sizes)} sizes up to {sizes[-1]} were captured: "
        f"{gib(memory.free)} of {gib(memory.total)} GiB are free; use {fewer}gpu_memory_utilization={lower:.2f}, or "
        "enforce_eager=true"
    )


def start_needs_more(options: Options, memory: DeviceMemory, use: MemoryUse) -> PermanentError:
    """Makes the error for a lack of memory at the start, when the KV cache is allocated. use: as measured."""
    return PermanentError(_crowded(options, memory, use))


def serving_needs_more(options: Options, memory: DeviceMemory, use: MemoryUse) -> StepError:
    """Makes the error for a lack of memory in a step of requests. use: as measured at the start."""
    return StepError(_crowded(options, memory, use))


def _crowded(options: Options, memory: DeviceMemory, use: MemoryUse) -> str:
    others = memory.total - memory.free - memory.reserved
    lower = _lower_utilization(options, others - use.others, memory.total)
    return (
        f"out of GPU memory: this worker holds {gib(memory.reserved)} of {gib(memory.total)} GiB, the driver and other "
        f"processes {gib(others)} ({gib(use.others)} when memory was measured), {gib(memory.free)} are free; other "
        f"processes use this GPU, too: start with gpu_memory_utilization={lower:.2f} instead of "
        f"{options.gpu_memory_utilization:g}"
    )


def _lower_utilization(options: Options, lacking: int, total: int) -> float:
    """Returns gpu_memory_utilization lowered by the missing memory, at least by 0.01, rounded down to two decimals."""
    lower = options.gpu_memory_utilization - max(lacking / total, 0.01)
    return max(0.01, math.floor(100 * lower) / 100)
