"""Memory: what the model, its KV cache and the processes take, and what there is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kernels.native.cores import control_groups
from octavo.doctor.machine import Check, Machine, gib, note, ok, problem
from octavo.doctor.probe import ModelFacts

# Measured, with the small model: a worker beside its weights and KV cache, and the other processes.
_WORKER, _SCHEDULER, _ROUTER, _LAUNCHER = (size * 2**20 for size in (300, 45, 80, 40))
# Control groups write so much for "no limit".
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes. available: without swapping. limit: where it comes from."""

    available: int
    limit: str


def check_memory(machine: Machine) -> Iterator[Check]:
    """Adds up host memory, and on GPUs the GPU's."""
    reading = machine.readings["model"]
    if reading.refusal:
        return  # another line says so
    if reading.model is None:
        torch = machine.readings["torch"].torch
        advice = "name a model that is here or on the hub with --model" if torch else "repair PyTorch, see above"
        yield problem("model", f"{machine.options.model} cannot be read: {reading.error}", advice)
        return
    yield from _check_sequences(machine, reading.model)
    yield _host(machine, reading.model, host_memory())
    if machine.on_gpu and machine.listing.gpus:
        yield _gpu(machine, reading.model)


def host_memory() -> HostMemory:
    """The memory of this machine, or what a control group leaves of it."""
    memory = psutil.virtual_memory()
    rooms = [HostMemory(available=memory.available, limit=f"{gib(memory.total)} of this machine")]
    for directory in control_groups("memory"):
        if (room := memory_room(directory)) is not None:
            rooms.append(room)
    return min(rooms, key=lambda room: room.available)


def memory_room(directory: Path) -> HostMemory | None:
    """The bytes that a control group's limit leaves, files that the kernel can drop not counted; None: no limit."""
    version2 = (directory / "memory.max").is_file()
    names = ("memory.max", "memory.current") if version2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if not (directory / names[0]).is_file():
        return None
    limit, used = ((directory / name).read_text().strip() for name in names)
    if limit == "max" or int(limit) > _NO_LIMIT:
        return None
    statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    droppable = int(statistics.get("inactive_file" if version2 else "total_inactive_file", 0))
    left = int(limit) - int(used) + droppable
    return HostMemory(available=left, limit=f"{gib(int(limit))} of its control group")


def kv_bytes(machine: Machine, model: ModelFacts) -> int:
    """Host memory of one worker's KV cache, and of swapped blocks."""
    options = machine.options
    num_bytes = 0
    if not machine.on_gpu:
        blocks = options.num_blocks_override
        num_bytes = (blocks + 1) * model.block_bytes if blocks else int(options.kv_cache_memory * 2**30)
    if options.preemption_mode == "swap":
        num_bytes += int(options.swap_space * 2**30)
    return num_bytes


def _host(machine: Machine, model: ModelFacts, memory: HostMemory) -> Check:
    weights, drafts, processes = _without_cache(machine, model)
    cache = machine.num_workers * kv_bytes(machine, model)
    needed = weights + drafts + cache + processes
    parts = [f"weights {gib(weights)} ({model.quantization})"] if weights else []
    parts += [f"draft model {gib(drafts)}"] if drafts else []
    parts += [f"KV {gib(cache)}"] if cache else []
    found = (
        f"{model.name} takes up to {gib(needed)} ({', '.join([*parts, f'processes {gib(processes)}'])}); "
        f"{gib(memory.available)} are available of {memory.limit}"
    )
    if needed <= memory.available:
        return ok("memory", found)
    return problem("memory", found, _smaller(machine, model, needed - memory.available, cache))


def _without_cache(machine: Machine, model: ModelFacts) -> tuple[int, int, int]:
    """Host memory of weights, draft models and processes."""
    options, workers = machine.options, machine.num_workers
    weights = 0 if machine.on_gpu else model.weight_bytes * options.data_parallel_size
    processes = workers * _WORKER + options.data_parallel_size * _SCHEDULER
    processes += options.num_router_processes * _ROUTER + _LAUNCHER
    return weights, model.draft_bytes * options.data_parallel_size, processes


def room_for_cache(machine: Machine, model: ModelFacts) -> int:
    """Bytes that the rest of the cluster leaves to each worker's KV cache on CPUs."""
    return max(0, (host_memory().available - sum(_without_cache(machine, model))) // machine.num_workers)


def _smaller(machine: Machine, model: ModelFacts, lacking: int, cache: int) -> str:
    """The options that make room, those that make enough of it alone."""
    options, ways = machine.options, list[str]()
    least = machine.num_workers * 2 * model.block_bytes
    if not machine.on_gpu and not options.num_blocks_override and cache - lacking > least:
        fitting = (cache - lacking) / machine.num_workers / 2**30
        ways.append(f"kv_cache_memory={max(0.01, int(fitting * 100) / 100):g}")
    if options.data_parallel_size > 1:
        ways.append(f"data_parallel_size={max(1, options.data_parallel_size // 2)} or less")
    if not machine.on_gpu and model.quantization == "none" and model.weight_bytes > 2 * lacking:
        ways.append("quantization=int8")
    ways.append("a smaller model, or a machine with more memory")
    return f"use {', or '.join(ways)}"


def _check_sequences(machine: Machine, model: ModelFacts) -> Iterator[Check]:
    """A worker on a CPU refuses a max_model_len that its KV cache cannot hold."""
    options = machine.options
    if machine.on_gpu:
        return
    blocks = options.num_blocks_override or int(options.kv_cache_memory * 2**30) // model.block_bytes - 1
    tokens, longest = blocks * model.block_size, options.max_model_len or model.context
    if blocks < 1:
        found = (
            f"kv_cache_memory={options.kv_cache_memory:g} GiB holds no KV block of {model.block_bytes / 2**20:.3g} MiB"
        )
        yield problem("KV cache", found, f"use kv_cache_memory={2.01 * model.block_bytes / 2**30:.3g} or more")
    elif tokens < longest:
        enough = (-(-longest // model.block_size) + 1) * model.block_bytes / 2**30
        worse = problem if options.max_model_len else note
        found = f"each replica's holds {tokens:,} tokens, less than one sequence of {longest:,}"
        yield worse("KV cache", found, f"use kv_cache_memory={enough + 0.005:.2f}, or max_model_len={tokens}")
    else:
        yield ok("KV cache", f"each replica's holds {tokens:,} tokens: {tokens / longest:.1f} sequences of {longest:,}")


def _gpu(machine: Machine, model: ModelFacts) -> Check:
    """Compares a worker's part of the weights with its share of the fullest GPU; a step's memory is not known here."""
    options = machine.options
    gpu = min(machine.listing.gpus, key=lambda gpu: gpu.free)
    share = options.gpu_memory_utilization
    usable, weights = gpu.total * share - (gpu.total - gpu.free), model.weight_bytes / options.world_size
    found = (
        f"weights take {gib(weights)} of the {gib(max(0, usable))} that gpu_memory_utilization={share:g} gives each "
        f"worker ({gib(gpu.free)} of {gib(gpu.total)} are free)"
    )
    if weights + 2 * model.block_bytes > usable:
        ways = "end what else uses the GPU, raise gpu_memory_utilization or tensor_parallel_size"
        return problem("GPU memory", found, f"{ways}, or use a smaller model or quantization=fp8")
    return ok("GPU memory", found)
