"""How the fused way into the cache ships: Llama in bf16, Qwen3 with head norms and an e4m3 cache, GPT-J's pairs of a
part of a head."""

from kernels.kv_cache.write import triton as gpu
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", num_heads=32),
        _build("norms-e4m3", num_heads=16, norms=True, cache="*fp8e4nv", archs=FP8_ARCHS),
        _build("norms-e4m3-bits", num_heads=16, norms=True, cache="*u8", archs=(80,)),
        _build("interleaved-part", num_heads=16, num_pairs=32, num_rest=64, interleaved=True),
    ]


def _build(
    name: str,
    *,
    num_heads: int,
    num_pairs: int = 64,
    num_rest: int = 0,
    interleaved: bool = False,
    norms: bool = False,
    cache: str = "*bf16",
    archs: tuple[int, ...] = ARCHS,
) -> KernelBuild:
    num_scales = 0 if cache == "*bf16" else 8
    weights, scales = ("q_weight_D", "k_weight_D"), ("k_scale", "v_scale")
    return KernelBuild(
        name=name,
        fn=gpu._rope_cache_write_kernel,
        signature={
            "qkv_TF": "*bf16",
            "cos_sin_LR": "*fp32",
            "cache_N2KBD": cache,
            "slots_T": "*i64",
            "eps": "fp32",
            "token_stride": "i32",
            "row_stride": "i32",
            **(dict.fromkeys(weights, "*bf16") if norms else {}),
            **(dict.fromkeys(scales, "*fp32") if num_scales else {}),
        },
        constexprs={
            "positions_T": None,
            **({} if norms else dict.fromkeys(weights)),
            **({} if num_scales else dict.fromkeys(scales)),
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": 8,
            "HEAD_SIZE": 2 * num_pairs + num_rest,
            "BLOCK_SIZE": 16,
            "NUM_PAIRS": num_pairs,
            "INTERLEAVED": interleaved,
            "K_SCALES": num_scales,
            "V_SCALES": num_scales,
            "HEADS": 16,
            "PAIRS": num_pairs,
            "REST": max(1, num_rest),
        },
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=("token_stride", "row_stride"),
        archs=archs,
    )
