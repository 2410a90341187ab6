"""Which device a worker computes on: a CPU, or which of the GPUs."""

import logging
import os
from dataclasses import dataclass

import torch

from configs.options import Options
from worker.device.device import CudaDevice, Device, InterpretedDevice
from worker.errors import PermanentError

_log = logging.getLogger("octavo.worker")

# Before it, GPUs have neither bf16 nor asynchronous copies to shared memory.
_LEAST_CAPABILITY = (8, 0)
_E4M3_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What decides whether the options can be computed on it. capability: such as (9, 0)."""

    name: str
    capability: tuple[int, int]


def select_device(options: Options, replica: int = 0, rank: int = 0) -> Device | None:
    """The GPU of one worker, as the option `device` says; None: it computes on a CPU.

    With TRITON_INTERPRET=1 in the environment a GPU need not be there: the CPU then runs what a GPU would, very slowly,
    to debug kernels or to test without one. Raises PermanentError if there is no GPU to be had, or it is too old.
    """
    if options.device == "cpu" or (options.device == "auto" and not _finds_gpu()):
        return None
    # Only who computes on a GPU takes the half second that Triton costs to import.
    from triton import knobs

    if knobs.runtime.interpret:
        _log.warning("TRITON_INTERPRET is set: the CPU does what a GPU would, very slowly")
        return InterpretedDevice()
    if missing := _why_no_gpu():
        raise PermanentError(f"device={options.device}: {missing}; device=cpu computes without a GPU")
    index = gpu_index(options, torch.cuda.device_count(), replica, rank)
    gpu = Gpu(name=torch.cuda.get_device_name(index), capability=torch.cuda.get_device_capability(index))
    check_gpu(options, gpu)
    return CudaDevice(index)


def gpu_index(options: Options, num_visible: int, replica: int, rank: int) -> int:
    """Among the GPUs that CUDA_VISIBLE_DEVICES lets this process see: workers of one host take one after the other.

    Raises PermanentError if they are more than there are GPUs.
    """
    num_workers = options.data_parallel_size * options.world_size
    # With tcp between them, schedulers and workers may be on several hosts: each has as many as it has GPUs.
    one_host = all(address.startswith("ipc://") for address in options.step_addresses)
    if one_host and num_workers > num_visible:
        most = num_visible // options.world_size
        asked, instead = f"data_parallel_size={options.data_parallel_size}", f"data_parallel_size={most} or less"
        if options.world_size > 1:
            asked += f" with tensor_parallel_size={options.tensor_parallel_size}"
        if not most:
            instead = f"tensor_parallel_size={num_visible} or less, or device=cpu"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "is not set")
        raise PermanentError(
            f"{asked} needs {num_workers} GPUs, one for each worker, but {num_visible} can be seen "
            f"(CUDA_VISIBLE_DEVICES={visible}): use {instead}"
        )
    return (replica * options.world_size + rank) % num_visible


def check_gpu(options: Options, gpu: Gpu) -> None:
    """Raises PermanentError for a GPU that is too old, for Octavo or for what the options ask of it."""
    if gpu.capability < _LEAST_CAPABILITY:
        raise PermanentError(
            f"device={options.device}: {gpu.name} has compute capability {_dotted(gpu.capability)}, and the kernels "
            f"need {_dotted(_LEAST_CAPABILITY)} or above (A100, RTX 30); device=cpu computes without a GPU"
        )
    if options.quantization == "fp8" and gpu.capability < _E4M3_CAPABILITY:
        raise PermanentError(
            f"quantization=fp8: {gpu.name} has compute capability {_dotted(gpu.capability)}, and e4m3 is multiplied "
            f"from {_dotted(_E4M3_CAPABILITY)} on (L4, RTX 40, H100): use quantization=none"
        )


def _finds_gpu() -> bool:
    # torch says cuda of AMD's GPUs, too, for which no kernel was made.
    return torch.version.cuda is not None and torch.cuda.is_available()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _why_no_gpu() -> str:
    """Empty if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        # Such as: no driver, a driver that is too old, no device.
        return f"torch {torch.__version__} finds no GPU ({str(error).strip()})"
    return ""
