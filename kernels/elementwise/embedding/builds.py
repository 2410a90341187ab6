"""How embedding ships: Llama-3.1-8B's, as it is and into a float32 stream, and one whose rows are shorter than a
tile."""

from kernels.elementwise.embedding import triton as gpu
from kernels.triton_common.kernel_build import KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", size=4096, tile=1024),
        _build("bf16-stream", size=4096, tile=1024, ids="*i32", out="*fp32"),
        _build("bf16-short", size=576, tile=1024),
    ]


def _build(name: str, *, size: int, tile: int, ids: str = "*i64", out: str = "*bf16") -> KernelBuild:
    strides = ("table_stride", "out_stride")
    return KernelBuild(
        name=name,
        fn=gpu._embedding_kernel,
        signature={
            "ids_T": ids,
            "table_VN": "*bf16",
            "out_TN": out,
            "first_id": "i32",
            "num_rows": "i32",
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={"SIZE": size, "TILE": tile},
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=strides,
    )
