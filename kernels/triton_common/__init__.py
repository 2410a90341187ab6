"""The parts that all Triton kernels share, and how to write, test and ship a kernel.

A kernel is in `triton.py` of its op's folder, or in files beside it that triton.py imports: a public function with the
contract and a private `_..._kernel`, decorated with `jit` of kernels.triton_common.jit. No `__init__.py` imports these
files at load, so that processes without a GPU do not load Triton.

In a kernel, from `kernels.triton_common.numbers`:

    widen(x)               float32 of any dtype; uint8 holds the bits of e4m3, as GPUs before sm_89 must read it
    widen_to(x, dtype)     the same, to the operand dtype of a dot
    narrow(x, dtype)       float32 rounded to nearest, to the dtype of the output; e4m3 saturates at 448
    dot(a, b, acc)         tl.dot that is right under the interpreter and does not round float32 to tf32

Elementwise arithmetic is always float32. Offsets into a KV cache are int64 (`.to(tl.int64)` on the block id).

Shipping: `builds.py` beside a kernel has `shipped() -> list[KernelBuild]` (kernels.triton_common.kernel_build), one
build for each configuration that matters, recorded from a call of the public function
(kernels.triton_common.recording). benchmarks/kernels/gpu_builds.py discovers the file, and compiles each build for its
architectures without a GPU; tests/kernels/test_ahead_of_time.py does so for a sample, and `-k OP` selects one op.

Tests import `DEVICE` from tests.support.gpu.gpu: the GPU if there is one, else the CPU, where Triton interprets.
tests/conftest.py sets TRITON_INTERPRET for that before anything imports Triton. Deliberate faults are data, in
tests/kernels/faults/<op>.py: `FAULTS = [Fault(...)]` (tests.support.kernels.faults).

Benchmarks: `benchmarks/gpu/ops/<op>.py` has `run(report: Report, *, toy: bool) -> None`; benchmarks/gpu/run_all.py
discovers it. A file there whose name begins with _ is not a benchmark.
"""
