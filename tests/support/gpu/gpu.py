"""The device on which Triton kernels run in tests."""

from triton import knobs

# With a GPU they are compiled for it; without one, tests/conftest.py makes Triton interpret them on the CPU.
DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
