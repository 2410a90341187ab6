"""How routing ships: Mixtral's and Qwen3's kind, and DeepSeek-V3's."""

from kernels.moe.routing.triton import NUM_WARPS, TOKENS, _route_kernel
from kernels.triton_common.kernel_build import KernelBuild


def shipped() -> list[KernelBuild]:
    softmax = {"GROUPS": 1, "TOP_GROUPS": 1, "GROUP_SIZE": 128, "GROUPS_2": 1, "GROUP_SIZE_2": 128}
    grouped = {"GROUPS": 8, "TOP_GROUPS": 4, "GROUP_SIZE": 32, "GROUPS_2": 8, "GROUP_SIZE_2": 32}
    return [
        _build("softmax-128", is_sigmoid=False, groups=softmax),
        _build("sigmoid-256", is_sigmoid=True, groups=grouped),
    ]


def _build(name: str, *, is_sigmoid: bool, groups: dict[str, int]) -> KernelBuild:
    signature = {
        "logits_TE": "*bf16",
        "weights_TK": "*fp32",
        "experts_TK": "*i32",
        "num_tokens": "i32",
        "stride": "i32",
        "scaling_factor": "fp32",
        "num_tokens_1": "*i32",
    }
    absent: dict[str, None] = {}
    if is_sigmoid:
        signature |= {"bias_E": "*fp32", "local_experts_E": "*i32"}
    else:
        absent = {"bias_E": None, "local_experts_E": None}
    return KernelBuild(
        name=name,
        fn=_route_kernel,
        signature=signature,
        constexprs={
            **absent,
            **groups,
            "SOFTMAX": not is_sigmoid,
            "RENORMALIZE": True,
            "HAS_BIAS": is_sigmoid,
            "IS_MAPPED": is_sigmoid,
            "IS_PADDED": True,
            "TOP_K": 8,
            "TOP_K_2": 8,
            "TOKENS": TOKENS,
        },
        num_warps=NUM_WARPS,
        num_stages=3,
        multiples_of_16=("stride",),
    )
