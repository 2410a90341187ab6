"""The device on which Triton kernels run in tests."""

import torch
from triton import knobs

from kernels.attention.plan import HostRows
from worker.device.device import CudaDevice, Device, InterpretedDevice

# With a GPU they are compiled for it; without one, tests/conftest.py makes Triton interpret them on the CPU.
DEVICE = "cpu" if knobs.runtime.interpret else "cuda"


def gpu_device() -> Device:
    """The GPU or, where Triton interprets its kernels, the CPU in its place."""
    return InterpretedDevice() if knobs.runtime.interpret else CudaDevice()


def host_rows(query_starts: torch.Tensor, context_lens: torch.Tensor) -> HostRows:
    """The rows of a step, as the host that made it knows them."""
    return HostRows(query_starts.diff().cpu().numpy(), context_lens.cpu().numpy())
