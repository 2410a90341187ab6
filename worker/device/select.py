"""Selects the device that a worker computes on: the CPU, or one of the GPUs."""

import logging
import os
from dataclasses import dataclass

import torch

from configs.options import Options
from worker.device.device import CudaDevice, Device, InterpretedDevice
from worker.errors import PermanentError

_log = logging.getLogger("octavo.worker")

# Older GPUs have neither bf16 nor asynchronous copies to shared memory.
_LEAST_CAPABILITY = (8, 0)
_E4M3_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The properties of a GPU that the options depend on. capability: such as (9, 0)."""

    name: str
    capability: tuple[int, int]


def select_device(options: Options, replica: int = 0, rank: int = 0) -> Device | None:
    """Returns one worker's GPU according to the option `device`, or None if it computes on a CPU.

    With TRITON_INTERPRET=1 in the environment no GPU is needed: the CPU runs the GPU's kernels, very slowly, to debug
    or test them. Raises PermanentError if no GPU is available, or it is too old.
    """
    if options.device == "cpu" or (options.device == "auto" and not _finds_gpu()):
        return None
    # Imported here: workers on a CPU save the half second that Triton's import takes.
    from triton import knobs

    if knobs.runtime.interpret:
        _log.warning("TRITON_INTERPRET is set: the CPU runs the GPU's kernels, very slowly")
        return InterpretedDevice()
    if missing := _why_no_gpu():
        raise PermanentError(f"device={options.device}: {missing}; device=cpu computes without a GPU")
    index = gpu_index(options, torch.cuda.device_count(), replica, rank)
    gpu = Gpu(name=torch.cuda.get_device_name(index), capability=torch.cuda.get_device_capability(index))
    check_gpu(options, gpu)
    return CudaDevice(index)


def gpu_index(options: Options, num_visible: int, replica: int, rank: int) -> int:
    """Returns the worker's index among the GPUs in CUDA_VISIBLE_DEVICES; each worker of a host takes the next one.

    Raises PermanentError if there are more workers than GPUs.
    """
    num_workers = options.data_parallel_size * options.world_size
    # With tcp, workers may be on several hosts, so their total may exceed the GPUs of this one.
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
            f"{asked} needs {num_workers} GPUs, one for each worker, but {num_visible} are visible "
            f"(CUDA_VISIBLE_DEVICES={visible}): use {instead}"
        )
    return (replica * options.world_size + rank) % num_visible


def check_gpu(options: Options, gpu: Gpu) -> None:
    """Raises PermanentError for a GPU that is too old for Octavo, or for an option."""
    if gpu.capability < _LEAST_CAPABILITY:
        raise PermanentError(
            f"device={options.device}: {gpu.name} has compute capability {_dotted(gpu.capability)}, and the kernels "
            f"need {_dotted(_LEAST_CAPABILITY)} or above (A100, RTX 30); device=cpu computes without a GPU"
        )
    if options.quantization == "fp8" and gpu.capability < _E4M3_CAPABILITY:
        raise PermanentError(
            f"quantization=fp8: {gpu.name} has compute capability {_dotted(gpu.capability)}, and e4m3 products need "
            f"{_dotted(_E4M3_CAPABILITY)} or above (L4, RTX 40, H100): use quantization=none"
        )


def _finds_gpu() -> bool:
    # torch's ROCm builds report AMD GPUs as cuda, too; they have no kernels here, and torch.version.cuda is None.
    return torch.version.cuda is not None and torch.cuda.is_available()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _why_no_gpu() -> str:
    """Returns why no GPU can be used; empty if one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        # Such as: no driver, a driver that is too old, no device.
        return f"torch {torch.__version__} finds no GPU ({str(error).strip()})"
    return ""
