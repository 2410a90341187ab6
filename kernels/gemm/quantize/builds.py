"""How quantization ships: activations of a hidden size that is a multiple of 16, and of one that is none."""

from typing import Any

from kernels.gemm.quantize import triton as gpu
from kernels.triton_common.kernel_build import FP8_ARCHS, KernelBuild


def shipped() -> list[KernelBuild]:
    tokens = {"POWER_OF_TWO": False, "TILE": 8192}
    groups = {"POWER_OF_TWO": False, "ROWS": 16}
    return [
        _build("tokens-whole", gpu._tokens_kernel, {**tokens, "WHOLE": True}, num_warps=8),
        _build("tokens-long", gpu._tokens_kernel, {**tokens, "WHOLE": False}, num_warps=8),
        _build("groups-few-rows", gpu._groups_kernel, {**groups, "ROWS": 1}, num_warps=1),
        _build("groups", gpu._groups_kernel, groups, num_warps=4),
        _build("groups-ue8m0", gpu._groups_kernel, {**groups, "POWER_OF_TWO": True}, num_warps=4),
        _build("groups-odd-size", gpu._groups_kernel, groups, num_warps=4, odd=True),
        _build("blocks", gpu._blocks_kernel, {"POWER_OF_TWO": False}, num_warps=8),
    ]


_TYPES = {"x": "*bf16", "w": "*bf16", "q": "*fp8e4nv", "scales": "*fp32"}


def _build(name: str, fn: Any, constexprs: dict[str, Any], *, num_warps: int, odd: bool = False) -> KernelBuild:
    arguments = [argument for argument in fn.arg_names if argument not in constexprs]
    return KernelBuild(
        name=name,
        fn=fn,
        signature={argument: _TYPES.get(argument, "i32") for argument in arguments},
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=3,
        multiples_of_16=() if odd else tuple({"row_stride", "K"} & set(arguments)),
        archs=FP8_ARCHS,
    )
