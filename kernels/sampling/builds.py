"""What kernels/sampling ships for GPUs."""

from kernels.sampling.triton import CHUNK, NUM_WARPS, _choose_kernel
from kernels.sampling.triton_adjust import _bitmask_kernel, _penalties_kernel
from kernels.sampling.triton_filters import BINS, FIRST_BINS, NUM_PASSES, _bin_kernel, _kept_mass_kernel, _maxima_kernel
from kernels.sampling.triton_verify import _verify_kernel
from kernels.triton_common.kernel_build import KernelBuild

# Pieces of a vocabulary of 128,256.
_BLOCK_C = 32

_ROWS = {"logits_LV": "*fp32", "rows_L": "*i32", "vocabulary": "i32", "stride": "i32"}
_FILTERS = {"temperature_R": "*fp32", "top_k_R": "*i64", "top_p_R": "*fp64"}
_SEARCH = {"maxima_LC": "*fp32", "states_PLX": "*i64", "counts_PLB": "*i64", "masses_PLB": "*i64", "num_scored": "i32"}


def _build(name: str, fn: object, signature: dict[str, str], **constexprs: object) -> KernelBuild:
    aligned = ("vocabulary", "stride") if "vocabulary" in signature else ()
    return KernelBuild(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        multiples_of_16=aligned,
    )


def shipped() -> list[KernelBuild]:
    steps = [
        _build(
            name,
            _bin_kernel,
            {**_ROWS, **_FILTERS, **_SEARCH},
            STEP=step,
            NUM_BINS=BINS if step else FIRST_BINS,
            FOR_TOP_P=step >= NUM_PASSES,
            CHUNK=CHUNK,
            BLOCK_C=_BLOCK_C,
        )
        for name, step in (("first-step", 0), ("top-k-step", 1), ("top-p-first-step", NUM_PASSES))
    ]
    kept = {**_ROWS, **_FILTERS, **_SEARCH, "min_p_R": "*fp32", "least_keys_L": "*i32", "masses_LC": "*i64"}
    choose = {
        **_ROWS,
        "logits_LV": "*bf16",
        "positions_L": "*i32",
        "temperature_R": "*fp32",
        "seed_R": "*i64",
        "choice_R": "*i32",
        "maxima_LC": "*fp32",
        "tokens_LC": "*i32",
        "least_keys_L": "*i32",
        "masses_LC": "*i64",
        "tokens_L": "*i32",
        "num_chunks": "i32",
    }
    penalties = {
        **_ROWS,
        "prompt_mask_RW": "*i32",
        "output_counts_RV": "*i32",
        "repetition_R": "*fp32",
        "presence_R": "*fp32",
        "frequency_R": "*fp32",
        "drafts_LD": "*i32",
        "counts_stride": "i32",
        "mask_stride": "i32",
    }
    bitmask = {
        "logits_LV": "*fp32",
        "mask_rows_L": "*i32",
        "bitmask_MW": "*i32",
        "vocabulary": "i32",
        "stride": "i32",
        "mask_stride": "i32",
    }
    verify = {"tokens_L": "*i32", "starts_N": "*i32", "num_drafts_N": "*i32", "drafts_ND": "*i32"}
    verify |= {"tokens_ND1": "*i32", "counts_N": "*i32"}
    return [
        _build("maxima", _maxima_kernel, {**_ROWS, "maxima_LC": "*fp32", "tokens_LC": "*i32"}, CHUNK=CHUNK),
        *steps,
        _build("kept-mass", _kept_mass_kernel, kept, FILTERS=True, CHUNK=CHUNK, BLOCK_C=_BLOCK_C),
        _build("choose-bf16", _choose_kernel, choose, DRAWS=True, CHUNK=CHUNK, BLOCK_C=_BLOCK_C),
        _build("penalties", _penalties_kernel, penalties, NUM_DRAFTS=3, CHUNK=CHUNK),
        _build("bitmask", _bitmask_kernel, bitmask, CHUNK=CHUNK),
        _build("verify", _verify_kernel, verify, WIDTH=4, BLOCK_D=4),
    ]
