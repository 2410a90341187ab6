"""Where Triton kernels run in tests."""

from triton import knobs

# With a GPU they are compiled for it; without, tests/conftest.py has made Triton interpret them on the CPU.
DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
