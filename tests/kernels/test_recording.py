"""A recorded launch describes the kernel that Triton would compile for it."""

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import mangle_type

from kernels.triton_common.device import arch_of
from kernels.triton_common.jit import jit
from kernels.triton_common.recording import bf16, float32, recorded, tensor


@jit(do_not_specialize=["count"])
def _kernel(x, out, bias, count, stride, factor, SIZE: tl.constexpr):
    tl.store(out, tl.load(x) * factor)


def _launch(stride: int = 48, **options: Any) -> None:
    _kernel[(1,)](bf16(4, 4), float32(4), None, 32, stride, 0.5, SIZE=8, **options)


def test_a_build_is_of_the_launch() -> None:
    build = recorded("some", lambda: _launch(num_warps=2), archs=(90,), expects_vectors=True)
    assert build.fn is _kernel
    assert build.signature == {"x": "*bf16", "out": "*fp32", "count": "i32", "stride": "i32", "factor": "fp32"}
    assert build.constexprs == {"bias": None, "SIZE": 8}
    # `count` is a multiple of 16 here, but is not specialized.
    assert build.multiples_of_16 == ("stride",)
    assert (build.num_warps, build.num_stages, build.archs, build.expects_vectors) == (2, 3, (90,), True)


@pytest.mark.parametrize("number", [0, 1, 2, 16, 17, (1 << 31) - 1, 1 << 31, -16])
def test_integers_have_the_types_that_triton_gives_them(number: int) -> None:
    build = recorded("some", lambda: _launch(number))
    assert build.signature.get("stride", "constexpr") == mangle_type(number, specialize=True)


def test_a_kernel_is_named_where_there_are_several() -> None:
    def launch() -> None:
        _launch(32)
        _launch(7)

    with pytest.raises(AssertionError, match="which of 2 launches"):
        recorded("some", launch)
    assert recorded("second", launch, kernel=_kernel, nth=1).multiples_of_16 == ()


def test_launches_depend_on_the_gpu_that_they_are_recorded_for() -> None:
    seen: list[int | None] = []

    def launch() -> None:
        seen.append(arch_of(tensor(torch.bfloat16, 1).device))
        _launch()

    for arch in (80, 90):
        recorded("some", launch, archs=(arch,))
    assert seen == [80, 90]
    assert arch_of("cpu") is None
