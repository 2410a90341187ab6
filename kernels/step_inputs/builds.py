"""How step inputs ship."""

from kernels.step_inputs import triton as gpu
from kernels.triton_common.kernel_build import KernelBuild

_COLUMNS = {
    "temperature": "*fp32",
    "top_k": "*i32",
    "top_p": "*fp64",
    "min_p": "*fp32",
    "seed": "*i64",
    "choice": "*i32",
}


def shipped() -> list[KernelBuild]:
    batch = _int32("rows_S", "query_starts", "context_lens_S", "host_token_ids_T", "last_tokens_R", "block_tables_RB")
    batch |= {**_int32("token_ids_T", "positions_T"), "slots_T": "*i64"}
    batch |= dict.fromkeys(("num_rows", "num_tokens", "num_halvings", "table_size"), "i32")
    columns = {key: dtype for name, dtype in _COLUMNS.items() for key in (f"{name}_R", f"new_{name}_M")}
    changes = _int32("block_tables_RB", "rows_C", "places_C", "block_ids_C")
    said = _int32("last_tokens_R", "rows_N", "tokens_ND1", "counts_N")
    return [
        *(
            _build(f"expand-blocks-of-{size}", gpu._expand_kernel, batch, BLOCK_SIZE=size, BLOCK_T=gpu._BLOCK)
            for size in (16, 32)
        ),
        _build(
            "write-tables",
            gpu._write_tables_kernel,
            {**changes, "num_changes": "i32", "table_size": "i32"},
            BLOCK_C=gpu._BLOCK,
        ),
        _build(
            "write-columns",
            gpu._write_columns_kernel,
            {"rows_M": "*i32", **columns, "num_new": "i32"},
            BLOCK_M=gpu._BLOCK,
        ),
        _build(
            "remember-tokens-after-drafts",
            gpu._remember_kernel,
            {**said, "num_rows": "i32", "stride": "i32"},
            HAS_COUNTS=True,
            BLOCK_N=gpu._BLOCK,
        ),
    ]


def _int32(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i32")


def _build(name: str, fn: object, signature: dict[str, str], **constexprs: object) -> KernelBuild:
    return KernelBuild(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=gpu._NUM_WARPS,
        num_stages=3,
        multiples_of_16=("table_size",) if "table_size" in signature else (),
    )
