"""The most memory for the KV cache with which a cluster starts and serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.doctor.machine import Machine
from octavo.doctor.subjects.memory import room_for_cache
from octavo.lab.errors import TuningError

_GIB = 2**30
# Leaves room for what else the machine does.
_SHARE_OF_HOST = 0.9
# Beside the blocks of sequences that run: those of finished ones, for the prefix cache.
_SPARE = 2.0
# As the guide does: from the top, by small steps.
_GPU_VALUES = tuple(round(0.98 - 0.02 * step, 2) for step in range(20))
_HOST_FACTORS = (1.0, 0.8, 0.6, 0.4, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRange:
    """The option, its values to try from the highest, and why there is none above."""

    option: str
    values: Sequence[float]
    why: str


def memory_values(machine: Machine, *, max_num_seqs: int, longest: int) -> MemoryRange:
    """Returns the values to try.

    machine: with the options of the largest setting. longest: tokens of a request. Raises TuningError.

    On CPUs the cache gets what the rest of the cluster leaves, and no more than the requests can fill: the kernel would
    end any process, not only ours, to find out more.
    """
    options = machine.options
    if machine.on_gpu:
        return MemoryRange(option="gpu_memory_utilization", values=_GPU_VALUES, why="a GPU's driver needs the rest")
    reading = machine.readings["model"]
    if reading.model is None:
        raise TuningError(f"{options.model} cannot be read: {reading.error or reading.refusal}")
    model = reading.model
    fits = _SHARE_OF_HOST * room_for_cache(machine, model) / _GIB
    blocks = max_num_seqs * -(-longest // model.block_size) + 1
    wanted = _SPARE * blocks * model.block_bytes / _GIB
    # A cache holds at least one sequence of the whole context.
    wanted = max(
        wanted, (-(-(options.max_model_len or model.context) // model.block_size) + 2) * model.block_bytes / _GIB
    )
    highest, why = (fits, "no more memory is free") if fits < wanted else (wanted, "the requests need no more")
    values = [max(0.01, int(highest * factor * 1000) / 1000) for factor in _HOST_FACTORS]
    return MemoryRange(option="kv_cache_memory", values=values, why=why)


def highest_that_works(values: Sequence[float], works: Callable[[float], str]) -> tuple[float, dict[float, str]]:
    """Returns the first value that works, and why those before it do not. works: returns why a value does not, or
    nothing. Raises TuningError if none does."""
    reasons: dict[float, str] = {}
    for value in values:
        reason = works(value)
        if not reason:
            return value, reasons
        reasons[value] = reason
    tried = ", ".join(f"{value:g}" for value in values)
    raise TuningError(f"the cluster starts with none of {tried}: {reasons[values[-1]]}")
