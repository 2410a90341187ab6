import pytest
import torch

from kernels.linear import GemmPath, PackedLinear, gemm_path
from kernels.linear.reference import linear


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_float32_agrees_with_float64(rows: int, bias: bool) -> None:
    """A wrong layout hint or a dropped bias shows up; sums of 96 float32 products round by about 1e-6 of the result."""
    torch.manual_seed(0)
    x, weight, bias_O = torch.randn(rows, 96), torch.randn(40, 96), torch.randn(40) if bias else None
    packed = PackedLinear(weight, bias_O, GemmPath.FLOAT32)
    torch.testing.assert_close(packed(x).double(), linear(x, weight, bias_O), rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_without_bf16_instructions_lose_nothing_more() -> None:
    """The weights of that path are bf16 numbers held as float32: against those very numbers it is exact to float32."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96), torch.randn(40, 96).bfloat16()
    packed = PackedLinear(weight, None, GemmPath.BFLOAT16_AS_FLOAT32)
    assert packed(x).dtype is torch.float32
    torch.testing.assert_close(packed(x).double(), linear(x, weight, None), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this CPU")
def test_bfloat16_rounds_once() -> None:
    """Sums are float32: only the output is rounded to bf16's 8 bits, 2^-8 at most."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 512).bfloat16(), torch.randn(40, 512).bfloat16(), torch.randn(40).bfloat16()
    y = PackedLinear(weight, bias, GemmPath.BFLOAT16)(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), linear(x, weight, bias), rtol=2**-8, atol=1e-3)


def test_the_path_follows_dtype_and_machine() -> None:
    assert gemm_path(torch.float32) is GemmPath.FLOAT32
    with open("/proc/cpuinfo") as cpuinfo:
        flags = set(next(line for line in cpuinfo if line.startswith("flags")).split())
    native = bool(flags & {"avx512_bf16", "amx_tile"})
    assert gemm_path(torch.bfloat16) is (GemmPath.BFLOAT16 if native else GemmPath.BFLOAT16_AS_FLOAT32)
    assert GemmPath.BFLOAT16_AS_FLOAT32.compute_dtype is torch.float32


def test_packing_keeps_nothing_of_the_tensor_given() -> None:
    """Loading overwrites and drops tensors after packing; a layer that still looked at them would change."""
    x, weight = torch.randn(3, 32), torch.randn(16, 32)
    packed = PackedLinear(weight, None, GemmPath.FLOAT32)
    before = packed(x)
    weight.zero_()
    assert torch.equal(packed(x), before)
