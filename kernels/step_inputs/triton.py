"""Makes a step's batch on the GPU: the host sends a few numbers a row, and need not know the last sampled tokens.

S rows of the batch, T tokens with padding, R permanent rows, B blocks of a row's table, C changed entries, M new rows,
N sampling rows.
"""

import torch
import triton.language as tl

from kernels.sampling.triton import SamplingColumns
from kernels.triton_common.integers import cdiv
from kernels.triton_common.jit import jit

# Items per program: a step of 256 decodes takes two programs.
_BLOCK = 128
_NUM_WARPS = 4


def expand(
    rows_S: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens_S: torch.Tensor,
    host_token_ids_T: torch.Tensor,
    last_tokens_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    *,
    block_size: int,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    shifts_S: torch.Tensor | None = None,
) -> None:
    """Writes each token's id, its position in the sequence and its slot in the KV cache.

    rows_S: int32, permanent rows; negative is padding. query_starts: int32 [S + 1], begins with 0, not descending: row
    i's tokens are query_starts[i] : query_starts[i + 1]. context_lens_S: int32, tokens of each row, these included.
    host_token_ids_T: int32; negative stands for the row's last token, which is in last_tokens_R (int32).
    block_tables_RB: int32, contiguous.

    Writes all of token_ids_T and positions_T (int32) and slots_T (int64): padding tokens, and tokens beyond
    query_starts[-1], get token id -1, position 0 and slot -1. shifts_S: int32, added to the positions of a row's
    tokens; slots do not depend on it.
    """
    num_rows, num_tokens = len(rows_S), len(token_ids_T)
    assert query_starts.shape == (num_rows + 1,)
    assert context_lens_S.shape == (num_rows,)
    assert host_token_ids_T.shape == positions_T.shape == slots_T.shape == (num_tokens,)
    assert shifts_S is None or shifts_S.shape == (num_rows,)
    assert block_tables_RB.is_contiguous()
    if num_tokens:
        _expand_kernel[(cdiv(num_tokens, _BLOCK),)](
            rows_S,
            query_starts,
            context_lens_S,
            host_token_ids_T,
            last_tokens_R,
            block_tables_RB,
            token_ids_T,
            positions_T,
            slots_T,
            shifts_S,
            num_rows,
            num_tokens,
            num_rows.bit_length(),
            block_tables_RB.shape[1],
            BLOCK_SIZE=block_size,
            BLOCK_T=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def write_tables(
    block_tables_RB: torch.Tensor, rows_C: torch.Tensor, places_C: torch.Tensor, block_ids_C: torch.Tensor
) -> None:
    """Sets block_tables_RB[rows_C[i], places_C[i]] = block_ids_C[i]. All int32; places are distinct."""
    assert block_tables_RB.is_contiguous()
    assert rows_C.shape == places_C.shape == block_ids_C.shape
    if num_changes := len(rows_C):
        _write_tables_kernel[(cdiv(num_changes, _BLOCK),)](
            block_tables_RB,
            rows_C,
            places_C,
            block_ids_C,
            num_changes,
            block_tables_RB.shape[1],
            BLOCK_C=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def write_columns(columns: SamplingColumns, rows_M: torch.Tensor, new: SamplingColumns) -> None:
    """Sets the sampling parameters of distinct rows: copies entry i of `new` to entry rows_M[i] of `columns`, bitwise.

    rows_M: int32. Both columns have the same dtypes.
    """
    pairs = (
        (columns.temperature_R, new.temperature_R),
        (columns.top_k_R, new.top_k_R),
        (columns.top_p_R, new.top_p_R),
        (columns.min_p_R, new.min_p_R),
        (columns.seed_R, new.seed_R),
        (columns.choice_R, new.choice_R),
    )
    for column_R, new_M in pairs:
        assert column_R.dtype is new_M.dtype
        assert new_M.shape == rows_M.shape
    if num_new := len(rows_M):
        _write_columns_kernel[(cdiv(num_new, _BLOCK),)](
            rows_M, *(tensor for pair in pairs for tensor in pair), num_new, BLOCK_M=_BLOCK, num_warps=_NUM_WARPS
        )


def remember_tokens(
    last_tokens_R: torch.Tensor, rows_N: torch.Tensor, tokens_ND1: torch.Tensor, counts_N: torch.Tensor | None = None
) -> None:
    """Stores the last token sampled for each row: last_tokens_R[rows_N[n]] = tokens_ND1[n, counts_N[n] - 1].

    All int32. rows_N: distinct; negative is padding. tokens_ND1: contiguous rows; [N], one token each, if
    counts_N is None. The -1 of a row whose logits were not finite is stored like any token.
    """
    num_rows = len(rows_N)
    assert len(tokens_ND1) == num_rows
    assert tokens_ND1.dim() == 1 if counts_N is None else len(counts_N) == num_rows
    if num_rows:
        _remember_kernel[(cdiv(num_rows, _BLOCK),)](
            last_tokens_R,
            rows_N,
            tokens_ND1,
            counts_N,
            num_rows,
            tokens_ND1.stride(0),
            HAS_COUNTS=counts_N is not None,
            BLOCK_N=_BLOCK,
            num_warps=_NUM_WARPS,
        )


@jit(do_not_specialize=["num_rows", "num_tokens", "num_halvings"])
def _expand_kernel(
    rows_S,
    query_starts,
    context_lens_S,
    host_token_ids_T,
    last_tokens_R,
    block_tables_RB,
    token_ids_T,
    positions_T,
    slots_T,
    shifts_S,
    num_rows,
    num_tokens,
    num_halvings,
    table_size,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = t < num_tokens
    # Binary search for the token's row, the first one that ends after the token.
    low = tl.zeros([BLOCK_T], tl.int32)
    high = low + num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        open_ = low < high
        ends = tl.load(query_starts + 1 + middle, mask=open_, other=0)
        before = open_ & (ends <= t)
        low = tl.where(before, middle + 1, low)
        high = tl.where(open_ & (ends > t), middle, high)
    row = tl.load(rows_S + low, mask=there & (low < num_rows), other=-1)
    real = row >= 0
    end = tl.load(query_starts + 1 + low, mask=real, other=0)
    position = tl.load(context_lens_S + low, mask=real, other=0) - (end - t)
    token = tl.load(host_token_ids_T + t, mask=real, other=-1)
    token = tl.where(token < 0, tl.load(last_tokens_R + row, mask=real & (token < 0), other=-1), token)
    place = row.to(tl.int64) * table_size + position // BLOCK_SIZE
    block = tl.load(block_tables_RB + place, mask=real, other=0).to(tl.int64)
    tl.store(token_ids_T + t, token, mask=there)
    turned = position
    if shifts_S is not None:
        turned += tl.load(shifts_S + low, mask=real, other=0)
    tl.store(positions_T + t, tl.where(real, turned, 0), mask=there)
    tl.store(slots_T + t, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=there)


@jit(do_not_specialize=["num_changes"])
def _write_tables_kernel(
    block_tables_RB, rows_C, places_C, block_ids_C, num_changes, table_size, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = c < num_changes
    place = tl.load(rows_C + c, mask=there, other=0).to(tl.int64) * table_size + tl.load(places_C + c, mask=there)
    tl.store(block_tables_RB + place, tl.load(block_ids_C + c, mask=there), mask=there)


@jit(do_not_specialize=["num_new"])
def _write_columns_kernel(
    rows_M,
    temperature_R,
    new_temperature_M,
    top_k_R,
    new_top_k_M,
    top_p_R,
    new_top_p_M,
    min_p_R,
    new_min_p_M,
    seed_R,
    new_seed_M,
    choice_R,
    new_choice_M,
    num_new,
    BLOCK_M: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < num_new
    row = tl.load(rows_M + m, mask=there, other=0)
    tl.store(temperature_R + row, tl.load(new_temperature_M + m, mask=there), mask=there)
    tl.store(top_k_R + row, tl.load(new_top_k_M + m, mask=there), mask=there)
    tl.store(top_p_R + row, tl.load(new_top_p_M + m, mask=there), mask=there)
    tl.store(min_p_R + row, tl.load(new_min_p_M + m, mask=there), mask=there)
    tl.store(seed_R + row, tl.load(new_seed_M + m, mask=there), mask=there)
    tl.store(choice_R + row, tl.load(new_choice_M + m, mask=there), mask=there)


@jit(do_not_specialize=["num_rows", "stride"])
def _remember_kernel(
    last_tokens_R, rows_N, tokens_ND1, counts_N, num_rows, stride, HAS_COUNTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows_N + n, mask=n < num_rows, other=-1)
    real = row >= 0
    places = tokens_ND1 + n * stride
    if HAS_COUNTS:
        places += tl.load(counts_N + n, mask=real, other=1) - 1
    tl.store(last_tokens_R + row, tl.load(places, mask=real, other=-1), mask=real)
