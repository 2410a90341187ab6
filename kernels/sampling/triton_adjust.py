"""Adjusts logits on a GPU, in place, before a token is chosen. kernels/sampling/numpy_cpu.py has the definitions.

The order is logit bias, penalties, bans of min_tokens, grammar, so that banned tokens stay banned.

L scored positions, R permanent rows, V vocabulary, W words of 32 tokens, K entries of a row's list, D drafts.
"""

import torch
import triton
import triton.language as tl

from kernels.triton_common.jit import jit

# Chunks of a row, as in kernels/sampling/triton.py.
CHUNK = 4096
NUM_WARPS = 4

_LARGEST = tl.constexpr(3.4028234663852886e38)


def add_logit_bias(
    logits_LV: torch.Tensor, rows_L: torch.Tensor, token_ids_RK: torch.Tensor, bias_RK: torch.Tensor
) -> None:
    """Adds each row's bias to its distinct tokens' logits.

    logits_LV: float32. rows_L: int32; negative is padding. token_ids_RK: int32, -1 where a row has fewer than K.
    bias_RK: float32.
    """
    num_scored, entries = _scored(logits_LV, rows_L), token_ids_RK.shape[1]
    if num_scored and entries:
        _bias_kernel[(num_scored,)](
            logits_LV, rows_L, token_ids_RK, bias_RK, logits_LV.stride(0), entries,
            BLOCK_K=triton.next_power_of_2(entries), num_warps=NUM_WARPS,
        )  # fmt: skip


def apply_penalties(
    logits_LV: torch.Tensor,
    rows_L: torch.Tensor,
    prompt_mask_RW: torch.Tensor,
    output_counts_RV: torch.Tensor,
    *,
    repetition_R: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
    drafts_LD: torch.Tensor | None = None,
) -> None:
    """Makes tokens less likely that have occurred in the row's prompt (repetition) or output (all three).

    logits_LV: float32. rows_L: int32; negative is padding. prompt_mask_RW: int32, token v is bit v % 32 of word v //
    32. output_counts_RV: int32. The parameters are float32 [R]; 1, 0 and 0 mean off. drafts_LD: int32, tokens drafted
    between the row's last token and each position, which count as output; -1 where there are fewer than D.
    """
    num_scored, vocabulary = _scored(logits_LV, rows_L), logits_LV.shape[1]
    assert output_counts_RV.shape[1] == vocabulary
    assert prompt_mask_RW.shape[1] == triton.cdiv(vocabulary, 32)
    if num_scored:
        _penalties_kernel[(triton.cdiv(vocabulary, CHUNK), num_scored)](
            logits_LV, rows_L, prompt_mask_RW, output_counts_RV, repetition_R, presence_R, frequency_R, drafts_LD,
            vocabulary, logits_LV.stride(0), output_counts_RV.stride(0), prompt_mask_RW.stride(0),
            NUM_DRAFTS=0 if drafts_LD is None else drafts_LD.shape[1], CHUNK=CHUNK, num_warps=NUM_WARPS,
        )  # fmt: skip


def ban_tokens(
    logits_LV: torch.Tensor,
    rows_L: torch.Tensor,
    positions_L: torch.Tensor,
    min_tokens_R: torch.Tensor,
    token_ids_RK: torch.Tensor,
) -> None:
    """Bans the tokens that would end an output of fewer than min_tokens tokens.

    logits_LV: float32. rows_L: int32; negative is padding. positions_L: int32, index in the output of the token to be
    chosen. min_tokens_R: int32. token_ids_RK: int32, -1 where a row has fewer than K.
    """
    num_scored, entries = _scored(logits_LV, rows_L), token_ids_RK.shape[1]
    if num_scored and entries:
        _ban_kernel[(num_scored,)](
            logits_LV, rows_L, positions_L, min_tokens_R, token_ids_RK, logits_LV.stride(0), entries,
            BLOCK_K=triton.next_power_of_2(entries), num_warps=NUM_WARPS,
        )  # fmt: skip


def apply_bitmask(logits_LV: torch.Tensor, mask_rows_L: torch.Tensor, bitmask_MW: torch.Tensor) -> None:
    """Leaves each position only the tokens that its grammar allows.

    logits_LV: float32, bf16 or fp16. mask_rows_L: int32, each position's row of the masks; negative: no mask.
    bitmask_MW: int32, token v is allowed if bit v % 32 of word v // 32 is set.
    """
    num_scored, vocabulary = _scored(logits_LV, mask_rows_L), logits_LV.shape[1]
    assert bitmask_MW.shape[1] == triton.cdiv(vocabulary, 32)
    if num_scored:
        _bitmask_kernel[(triton.cdiv(vocabulary, CHUNK), num_scored)](
            logits_LV, mask_rows_L, bitmask_MW, vocabulary, logits_LV.stride(0), bitmask_MW.stride(0),
            CHUNK=CHUNK, num_warps=NUM_WARPS,
        )  # fmt: skip


def count_output(
    output_counts_RV: torch.Tensor, rows_N: torch.Tensor, tokens_ND: torch.Tensor, counts_N: torch.Tensor
) -> None:
    """Counts output tokens: tokens_ND[n, : counts_N[n]] are those of row rows_N[n].

    All int32; a negative row is padding, a negative token is not counted. Rows are distinct.
    """
    if len(rows_N):
        _count_kernel[(len(rows_N),)](
            output_counts_RV, rows_N, tokens_ND, counts_N, output_counts_RV.stride(0), tokens_ND.stride(0), num_warps=1
        )


def _scored(logits_LV: torch.Tensor, rows_L: torch.Tensor) -> int:
    assert logits_LV.stride(1) == 1
    assert rows_L.shape == logits_LV.shape[:1]
    return len(rows_L)


@jit
def _bias_kernel(logits_LV, rows_L, token_ids_RK, bias_RK, stride, entries, BLOCK_K: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows_L + at).to(tl.int64)
    if row < 0:
        return
    k = tl.arange(0, BLOCK_K)
    tokens = tl.load(token_ids_RK + row * entries + k, mask=k < entries, other=-1)
    bias = tl.load(bias_RK + row * entries + k, mask=tokens >= 0, other=0.0)
    places = logits_LV + at.to(tl.int64) * stride + tokens
    tl.store(places, tl.load(places, mask=tokens >= 0, other=0.0) + bias, mask=tokens >= 0)


@jit
def _penalties_kernel(
    logits_LV,
    rows_L,
    prompt_mask_RW,
    output_counts_RV,
    repetition_R,
    presence_R,
    frequency_R,
    drafts_LD,
    vocabulary,
    stride,
    counts_stride,
    mask_stride,
    NUM_DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, at = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_L + at).to(tl.int64)
    if row < 0:
        return
    repetition = tl.load(repetition_R + row)
    presence = tl.load(presence_R + row)
    frequency = tl.load(frequency_R + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    there = tokens < vocabulary
    places = logits_LV + at.to(tl.int64) * stride + tokens
    logits = tl.load(places, mask=there, other=0.0)
    counts = tl.load(output_counts_RV + row * counts_stride + tokens, mask=there, other=0)
    for i in tl.static_range(NUM_DRAFTS):  # pyright: ignore[reportGeneralTypeIssues]
        counts += (tokens == tl.load(drafts_LD + at * NUM_DRAFTS + i)).to(tl.int32)
    words = tl.load(prompt_mask_RW + row * mask_stride + tokens // 32, mask=there, other=0)
    in_prompt = ((words >> (tokens % 32)) & 1) != 0
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    # A tiny penalty may overflow; infinity would make the row unusable.
    repeated = tl.minimum(tl.maximum(repeated, -_LARGEST), _LARGEST)
    # Logits that are not finite stay so: a ban, or a row that cannot be sampled.
    logits = tl.where((in_prompt | (counts > 0)) & (tl.abs(logits) < float("inf")), repeated, logits)
    logits -= frequency * counts.to(tl.float32)
    logits -= tl.where(counts > 0, presence, 0.0)
    tl.store(places, logits, mask=there)


@jit
def _ban_kernel(logits_LV, rows_L, positions_L, min_tokens_R, token_ids_RK, stride, entries, BLOCK_K: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows_L + at).to(tl.int64)
    if row < 0:
        return
    if tl.load(positions_L + at) >= tl.load(min_tokens_R + row):
        return
    k = tl.arange(0, BLOCK_K)
    tokens = tl.load(token_ids_RK + row * entries + k, mask=k < entries, other=-1)
    tl.store(logits_LV + at.to(tl.int64) * stride + tokens, float("-inf"), mask=tokens >= 0)


@jit
def _bitmask_kernel(logits_LV, mask_rows_L, bitmask_MW, vocabulary, stride, mask_stride, CHUNK: tl.constexpr):
    chunk, at = tl.program_id(0), tl.program_id(1)
    row = tl.load(mask_rows_L + at).to(tl.int64)
    if row < 0:
        return
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    words = tl.load(bitmask_MW + row * mask_stride + tokens // 32, mask=tokens < vocabulary, other=-1)
    banned = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_LV + at.to(tl.int64) * stride + tokens, float("-inf"), mask=banned & (tokens < vocabulary))


@jit
def _count_kernel(output_counts_RV, rows_N, tokens_ND, counts_N, counts_stride, tokens_stride):
    n = tl.program_id(0)
    row = tl.load(rows_N + n).to(tl.int64)
    if row < 0:
        return
    # One at a time, since a token may occur twice in a row.
    for i in range(tl.load(counts_N + n)):
        token = tl.load(tokens_ND + n * tokens_stride + i)
        place = output_counts_RV + row * counts_stride + token
        tl.atomic_add(place, 1, mask=token >= 0, sem="relaxed")
