"""How SiLU-mul ships: the MLP of Llama-3.1-8B, whole and as a rank's share."""

from typing import Any

from kernels.elementwise.silu_mul import triton as gpu
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild

_TYPES = {"gate_up_T2N": "*bf16", "out_TN": "*bf16", "q_TN": "*fp8e4nv", "scales_T1": "*fp32", "scales_TG": "*fp32"}


def shipped() -> list[KernelBuild]:
    long, share = gpu._MAX_ROW_TILE, 4096
    return [
        _build("silu", gpu._silu_mul_kernel, {"TILE": gpu._TILE}, num_warps=gpu._NUM_WARPS),
        _build("gelu", gpu._silu_mul_kernel, {"TILE": gpu._TILE, "GELU": True}, num_warps=gpu._NUM_WARPS),
        _build("tokens", gpu._silu_mul_tokens_kernel, {"TILE": long}, num_warps=gpu.row_warps(long), archs=FP8_ARCHS),
        _build(
            "tokens-share",
            gpu._silu_mul_tokens_kernel,
            {"TILE": share, "SIZE": 3584},
            num_warps=gpu.row_warps(share),
            archs=FP8_ARCHS,
        ),
        _build("groups", gpu._silu_mul_groups_kernel, {"GROUPS": 8}, num_warps=gpu._NUM_WARPS, archs=FP8_ARCHS),
    ]


def _build(
    name: str, fn: Any, constexprs: dict[str, Any], *, num_warps: int, archs: tuple[int, ...] = ARCHS
) -> KernelBuild:
    all_constexprs = {"SIZE": 14336, "GELU": False, "POWER_OF_TWO": False, **constexprs}
    own = {argument: value for argument, value in all_constexprs.items() if argument in fn.arg_names}
    arguments = [argument for argument in fn.arg_names if argument not in own]
    return KernelBuild(
        name=name,
        fn=fn,
        signature={argument: _TYPES.get(argument, "i32") for argument in arguments},
        constexprs=own,
        num_warps=num_warps,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=tuple({"row_stride", "out_stride"} & set(arguments)),
        archs=archs,
    )
