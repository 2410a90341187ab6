"""How rope ships: Llama's heads with a step's turns, and GPT-J's pairs of a part of a head with a table."""

from kernels.elementwise.rope import triton as gpu
from kernels.triton_common.kernel_build import KernelBuild


def shipped() -> list[KernelBuild]:
    return [
        _build("halves", num_pairs=64, interleaved=False, positions=False),
        _build("interleaved-part", num_pairs=32, interleaved=True, positions=True),
        KernelBuild(
            name="cos-sin-rows",
            fn=gpu._cos_sin_kernel,
            signature={
                "positions_T": "*i32",
                "frequencies_P": "*fp32",
                "out_TR": "*fp32",
                "magnitude": "fp32",
                "num_tokens": "i32",
            },
            constexprs={"NUM_PAIRS": 64, "TOKENS": gpu._TOKENS_OF_ROWS, "PAIRS": 64},
            num_warps=gpu._NUM_WARPS,
            num_stages=3,
        ),
    ]


def _build(name: str, *, num_pairs: int, interleaved: bool, positions: bool) -> KernelBuild:
    strides = ("q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride", "row_stride")
    return KernelBuild(
        name=name,
        fn=gpu._rope_kernel,
        signature={
            "q_THD": "*bf16",
            "k_TKD": "*bf16",
            "cos_sin_LR": "*fp32",
            **({"positions_T": "*i64"} if positions else {}),
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={
            **({} if positions else {"positions_T": None}),
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "NUM_PAIRS": num_pairs,
            "INTERLEAVED": interleaved,
            "HEADS": gpu._TILE // (2 * num_pairs),
            "PAIRS": num_pairs,
        },
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        expects_vectors=True,
        multiples_of_16=strides,
    )
