"""How cache write ships: Llama's shape in each cache dtype, and a head size that is no power of two."""

from kernels.cache_write import gpu
from kernels.tiles.build import ARCHS, FP8_ARCHS, KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", "*bf16"),
        _build("bf16-d80", "*bf16", head_size=80),
        _build("e4m3", "*fp8e4nv", num_scales=1, archs=FP8_ARCHS),
        _build("e4m3-by-head", "*fp8e4nv", num_scales=8, archs=FP8_ARCHS),
        _build("e4m3-bits", "*u8", num_scales=1, archs=(80,)),
    ]


def _build(
    name: str, cache: str, *, head_size: int = 128, num_scales: int = 0, archs: tuple[int, ...] = ARCHS
) -> KernelBuild:
    rows, tile = gpu.tile_of(head_size)
    scale = {} if num_scales else {"k_scale": None, "v_scale": None}
    strides = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")
    return KernelBuild(
        name=name,
        fn=gpu._cache_write_kernel,
        signature={
            "k_TKD": "*bf16",
            "v_TKD": "*bf16",
            "cache_N2KBD": cache,
            "slots_T": "*i64",
            **({"k_scale": "*fp32", "v_scale": "*fp32"} if num_scales else {}),
            "num_tokens": "i32",
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={
            **scale,
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_SIZE": head_size,
            "K_SCALES": num_scales,
            "V_SCALES": num_scales,
            "ROWS": rows,
            "TILE": tile,
        },
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=strides,
        archs=archs,
    )
