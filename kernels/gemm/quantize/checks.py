"""Checks of the inputs of FP8 kernels."""

from functools import lru_cache

import torch

from kernels.triton_common.kernel_build import FP8_ARCHS

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_input(name: str, x: torch.Tensor) -> None:
    """Raises ValueError unless x is a matrix of floats, contiguous in the last dim, on a device with e4m3."""
    if x.dim() != 2 or x.dtype not in _FLOATS or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(
            f"{name} of shape {tuple(x.shape)}, strides {x.stride()} and {x.dtype}: has to be a matrix of bfloat16, "
            "float16 or float32 whose last dim is contiguous (x.view(-1, x.shape[-1]), x.contiguous())"
        )
    check_device(x.device)


def has_e4m3(device: torch.device) -> bool:
    """True if the device computes with e4m3. A CPU does, since it interprets kernels."""
    return device.type != "cuda" or _capability(device) >= min(FP8_ARCHS)


def check_device(device: torch.device) -> None:
    """Raises ValueError for a GPU without e4m3."""
    if not has_e4m3(device):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {_capability(device) / 10:.1f}, FP8 needs "
            "8.9 (Ada) or 9.0 (Hopper) and newer; quantization=none works here"
        )


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
