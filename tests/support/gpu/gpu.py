"""The device on which Triton kernels run in tests."""

from triton import knobs

from worker.device.device import CudaDevice, Device, InterpretedDevice

# With a GPU they are compiled for it; without one, tests/conftest.py makes Triton interpret them on the CPU.
DEVICE = "cpu" if knobs.runtime.interpret else "cuda"


def gpu_device() -> Device:
    """The GPU or, where Triton interprets its kernels, the CPU in its place."""
    return InterpretedDevice() if knobs.runtime.interpret else CudaDevice()
