"""How cache write of MLA ships: DeepSeek's sizes in each cache dtype."""

from kernels.kv_cache.latent_write import triton as gpu
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", "*bf16"),
        _build("e4m3", "*fp8e4nv", archs=FP8_ARCHS),
        _build("e4m3-bits", "*u8", archs=(80,)),
    ]


def _build(name: str, cache: str, *, archs: tuple[int, ...] = ARCHS) -> KernelBuild:
    has_scale = cache != "*bf16"
    return KernelBuild(
        name=name,
        fn=gpu._mla_cache_write_kernel,
        signature={
            "latent_TL": "*bf16",
            "rope_TR": "*bf16",
            "cache_NBE": cache,
            "slots_T": "*i64",
            **({"kv_scale": "*fp32"} if has_scale else {}),
            "latent_stride": "i32",
            "rope_stride": "i32",
        },
        constexprs={**({} if has_scale else {"kv_scale": None}), "LATENT": 512, "ROPE": 64},
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=("latent_stride", "rope_stride"),
        archs=archs,
    )
