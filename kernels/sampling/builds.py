"""Ahead-of-time builds of sampling: rows of logits that are scored, for vocabularies of 128,256 tokens."""

from collections.abc import Callable

import torch

from kernels.sampling.triton import SamplingColumns, _choose_kernel, sample
from kernels.sampling.triton_adjust import (
    add_logit_bias,
    apply_bitmask,
    apply_penalties,
    ban_sequences,
    ban_tokens,
    count_output,
    remember_output,
)
from kernels.sampling.triton_filters import _bin_kernel, _kept_mass_kernel, _maxima_kernel
from kernels.sampling.triton_verify import verify
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import bf16, float32, int32, recorded, tensor

_NUM_SCORED, _NUM_ROWS, _VOCABULARY = 8, 256, 128256
# Entries of a row's bias, tokens that would end its output, drafts.
_NUM_ENTRIES, _NUM_DRAFTS = 16, 3
# Output tokens that a row with bad words keeps.
_HISTORY = 1024


def shipped() -> list[KernelBuild]:
    rows_L, logits_LV = int32(_NUM_SCORED), float32(_NUM_SCORED, _VOCABULARY)
    ids_RK, mask_RW = int32(_NUM_ROWS, _NUM_ENTRIES), int32(_NUM_ROWS, _VOCABULARY // 32)
    counts_RV, counts_N = int32(_NUM_ROWS, _VOCABULARY), int32(_NUM_SCORED)
    tokens_ND1, drafts_ND = int32(_NUM_SCORED, _NUM_DRAFTS + 1), int32(_NUM_SCORED, _NUM_DRAFTS)
    said_RH, rows_R = int32(_NUM_ROWS, _HISTORY), int32(_NUM_ROWS)
    bias_RK, column_R = float32(_NUM_ROWS, _NUM_ENTRIES), float32(_NUM_ROWS)
    return [
        recorded("maxima", _sample(), kernel=_maxima_kernel),
        recorded("first-step", _sample(), kernel=_bin_kernel, nth=0),
        recorded("step", _sample(), kernel=_bin_kernel, nth=1),
        recorded("kept-mass", _sample(), kernel=_kept_mass_kernel),
        recorded("kept-mass-unfiltered", _sample(filters=False), kernel=_kept_mass_kernel),
        recorded("choose", _sample(), kernel=_choose_kernel),
        recorded("choose-bf16", _sample(bf16), kernel=_choose_kernel),
        recorded("choose-greedy", _sample(draws=False, filters=False), kernel=_choose_kernel),
        recorded("bias", lambda: add_logit_bias(logits_LV, rows_L, ids_RK, bias_RK)),
        recorded("ban", lambda: ban_tokens(logits_LV, rows_L, rows_L, int32(_NUM_ROWS), ids_RK)),
        recorded(
            "ban-sequences",
            lambda: ban_sequences(logits_LV, rows_L, rows_L, ids_RK, ids_RK, said_RH, drafts_LD=drafts_ND),
        ),
        recorded("remember-output", lambda: remember_output(said_RH, rows_R, counts_N, tokens_ND1, counts_N)),
        recorded("bitmask", lambda: apply_bitmask(logits_LV, rows_L, mask_RW)),
        recorded("count-output", lambda: count_output(counts_RV, counts_N, tokens_ND1, counts_N)),
        recorded(
            "penalties",
            lambda: apply_penalties(
                logits_LV,
                rows_L,
                mask_RW,
                counts_RV,
                repetition_R=column_R,
                presence_R=column_R,
                frequency_R=column_R,
                drafts_LD=int32(_NUM_SCORED, _NUM_DRAFTS),
            ),
        ),
        recorded("verify", lambda: verify(rows_L, rows_L, int32(_NUM_SCORED + 1), tokens_ND1, counts_N)),
    ]


def _sample(
    logits: Callable[[int, int], torch.Tensor] = float32, *, draws: bool = True, filters: bool = True
) -> Callable[[], None]:
    """A call as worker.sampling.filters makes it, with columns of its dtypes."""
    columns = SamplingColumns(
        temperature_R=float32(_NUM_ROWS),
        top_k_R=int32(_NUM_ROWS),
        top_p_R=tensor(torch.float64, _NUM_ROWS),
        min_p_R=float32(_NUM_ROWS),
        seed_R=tensor(torch.int64, _NUM_ROWS),
        choice_R=int32(_NUM_ROWS),
    )
    scored_L = int32(_NUM_SCORED)
    return lambda: sample(
        logits(_NUM_SCORED, _VOCABULARY), scored_L, scored_L, columns, scored_L, draws=draws, filters=filters
    )
