"""Adjusts logits on a GPU, in place, before a token is chosen. kernels/sampling/numpy_cpu.py has the definitions.

The order is logit bias, penalties, bans (min_tokens, bad words, masks), so that banned tokens stay banned.

L scored positions, R permanent rows, V vocabulary, W words of 32 tokens, K entries of a row's list, D drafts.
"""

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv, next_power_of_2
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
            logits_LV,
            rows_L,
            token_ids_RK,
            bias_RK,
            logits_LV.stride(0),
            entries,
            BLOCK_K=next_power_of_2(entries),
            num_warps=NUM_WARPS,
        )


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
    assert prompt_mask_RW.shape[1] == cdiv(vocabulary, 32)
    if num_scored:
        _penalties_kernel[(cdiv(vocabulary, CHUNK), num_scored)](
            logits_LV,
            rows_L,
            prompt_mask_RW,
            output_counts_RV,
            repetition_R,
            presence_R,
            frequency_R,
            drafts_LD,
            vocabulary,
            logits_LV.stride(0),
            output_counts_RV.stride(0),
            prompt_mask_RW.stride(0),
            NUM_DRAFTS=0 if drafts_LD is None else drafts_LD.shape[1],
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )


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
            logits_LV,
            rows_L,
            positions_L,
            min_tokens_R,
            token_ids_RK,
            logits_LV.stride(0),
            entries,
            BLOCK_K=next_power_of_2(entries),
            num_warps=NUM_WARPS,
        )


def apply_bitmask(logits_LV: torch.Tensor, mask_rows_L: torch.Tensor, bitmask_MW: torch.Tensor) -> None:
    """Leaves each position only the tokens that its mask allows.

    logits_LV: float32, bf16 or fp16. mask_rows_L: int32, each position's row of the masks; negative: no mask.
    bitmask_MW: int32, token v is allowed if bit v % 32 of word v // 32 is set.
    """
    num_scored, vocabulary = _scored(logits_LV, mask_rows_L), logits_LV.shape[1]
    assert bitmask_MW.shape[1] == cdiv(vocabulary, 32)
    if num_scored:
        _bitmask_kernel[(cdiv(vocabulary, CHUNK), num_scored)](
            logits_LV,
            mask_rows_L,
            bitmask_MW,
            vocabulary,
            logits_LV.stride(0),
            bitmask_MW.stride(0),
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )


def ban_sequences(
    logits_LV: torch.Tensor,
    rows_L: torch.Tensor,
    positions_L: torch.Tensor,
    token_ids_RT: torch.Tensor,
    ends_RK: torch.Tensor,
    said_RH: torch.Tensor,
    *,
    drafts_LD: torch.Tensor | None = None,
) -> None:
    """Bans the last token of each of a row's sequences where the output before the position ends with the others.

    logits_LV: float32. rows_L: int32; negative is padding. positions_L: int32, index in the output of the token to be
    chosen. token_ids_RT: int32, a row's sequences one after the other. ends_RK: int32, ascending, where each ends in
    token_ids_RT; 0 where there are fewer than K. said_RH: int32, the output token at position p is at p % H; H is at
    least the longest sequence. drafts_LD: int32, tokens drafted between the row's last token and each position, which
    count as output; -1 where there are fewer than D.
    """
    num_scored, entries = _scored(logits_LV, rows_L), ends_RK.shape[1]
    if num_scored and entries:
        _ban_sequences_kernel[(num_scored,)](
            logits_LV,
            rows_L,
            positions_L,
            token_ids_RT,
            ends_RK,
            said_RH,
            drafts_LD,
            logits_LV.stride(0),
            token_ids_RT.stride(0),
            entries,
            HISTORY=said_RH.shape[1],
            NUM_DRAFTS=0 if drafts_LD is None else drafts_LD.shape[1],
            BLOCK_K=next_power_of_2(entries),
            num_warps=NUM_WARPS,
        )


def remember_output(
    said_RH: torch.Tensor,
    lengths_R: torch.Tensor,
    rows_N: torch.Tensor,
    tokens_ND: torch.Tensor,
    counts_N: torch.Tensor,
) -> None:
    """Appends tokens_ND[n, : counts_N[n]] to the output of row rows_N[n], for `ban_sequences`.

    All int32; a negative row is padding. Rows are distinct. lengths_R: the tokens of each row's output so far.
    """
    if len(rows_N):
        _remember_kernel[(len(rows_N),)](
            said_RH, lengths_R, rows_N, tokens_ND, counts_N, tokens_ND.stride(0), HISTORY=said_RH.shape[1], num_warps=1
        )


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
def _ban_sequences_kernel(
    logits_LV,
    rows_L,
    positions_L,
    token_ids_RT,
    ends_RK,
    said_RH,
    drafts_LD,
    stride,
    tokens_stride,
    entries,
    HISTORY: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows_L + at).to(tl.int64)
    if row < 0:
        return
    position = tl.load(positions_L + at)
    k = tl.arange(0, BLOCK_K)
    ends = tl.load(ends_RK + row * entries + k, mask=k < entries, other=0)
    starts = tl.load(ends_RK + row * entries + k - 1, mask=(k > 0) & (k < entries), other=0)
    # Tokens before the last one.
    prefixes = tl.where(ends > 0, ends - starts - 1, 0)
    matches = (ends > 0) & (prefixes <= position)
    num_drafts = 0
    for i in tl.static_range(NUM_DRAFTS):  # pyright: ignore[reportGeneralTypeIssues]
        num_drafts += (tl.load(drafts_LD + at * NUM_DRAFTS + i) >= 0).to(tl.int32)
    tokens = token_ids_RT + row * tokens_stride + ends - 1
    for back in range(1, tl.max(tl.where(matches, prefixes, 0), 0) + 1):  # pyright: ignore[reportOperatorIssue, reportArgumentType]
        said = tl.load(said_RH + row * HISTORY + (position - back) % HISTORY)
        if NUM_DRAFTS > 0:
            draft = tl.load(drafts_LD + at * NUM_DRAFTS + num_drafts - back, mask=back <= num_drafts, other=0)
            said = tl.where(back <= num_drafts, draft, said)
        expected = tl.load(tokens - back, mask=matches & (back <= prefixes), other=-1)
        matches = matches & ((back > prefixes) | (expected == said))
    banned = tl.load(tokens, mask=matches, other=0)
    tl.store(logits_LV + at.to(tl.int64) * stride + banned, float("-inf"), mask=matches)


@jit
def _remember_kernel(said_RH, lengths_R, rows_N, tokens_ND, counts_N, tokens_stride, HISTORY: tl.constexpr):
    n = tl.program_id(0)
    row = tl.load(rows_N + n).to(tl.int64)
    if row < 0:
        return
    length, count = tl.load(lengths_R + row), tl.load(counts_N + n)
    for i in range(count):
        token = tl.load(tokens_ND + n * tokens_stride + i)
        tl.store(said_RH + row * HISTORY + (length + i) % HISTORY, token)
    tl.store(lengths_R + row, length + count)


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
