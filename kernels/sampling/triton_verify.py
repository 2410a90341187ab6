"""Verification of drafts by exact match on a GPU.

N rows, L scored positions (each row's last token before its drafts, then each draft), D the most drafts, D1 = D + 1.
"""

import torch
import triton.language as tl

from kernels.triton_common.integers import next_power_of_2
from kernels.triton_common.jit import jit


def verify(
    tokens_L: torch.Tensor,
    inputs_L: torch.Tensor,
    starts_N1: torch.Tensor,
    tokens_ND1: torch.Tensor,
    counts_N: torch.Tensor,
) -> None:
    """Writes each row's output: its draws, up to and including the first that differs from the draft at its place.

    tokens_L: the token that `sample` chose at each position, or -1. inputs_L: the token at each position: a row's last
    one, which is not read, then its drafts. starts_N1: [N + 1]; row n's positions are starts_N1[n] : starts_N1[n + 1],
    at most D1 of them; a row without positions is padding, for which nothing is read or written. Writes
    tokens_ND1[n, : counts_N[n]]; the last of them may be -1. All int32, contiguous.

    A draft is accepted if and only if the draw of (seed, choice, position) gives the same token, so output never
    depends on drafts; counts_N[n] - 1 drafts are accepted.
    """
    num_rows, width = tokens_ND1.shape
    assert starts_N1.shape == (num_rows + 1,)
    if num_rows:
        _verify_kernel[(num_rows,)](
            tokens_L,
            inputs_L,
            starts_N1,
            tokens_ND1,
            counts_N,
            WIDTH=width,
            BLOCK_D=next_power_of_2(width),
            num_warps=1,
        )


@jit
def _verify_kernel(tokens_L, inputs_L, starts_N1, tokens_ND1, counts_N, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    n = tl.program_id(0)
    start = tl.load(starts_N1 + n)
    num_drafts = tl.load(starts_N1 + n + 1) - start - 1
    if num_drafts < 0:
        return
    d = tl.arange(0, BLOCK_D)
    said = tl.load(tokens_L + start + d, mask=d <= num_drafts, other=-1)
    drafts = tl.load(inputs_L + start + 1 + d, mask=d < num_drafts, other=-1)
    # The first position whose token differs from its draft; the last position has no draft.
    last = tl.min(tl.where((said != drafts) | (said < 0), d, BLOCK_D))
    tl.store(tokens_ND1 + n * WIDTH + d, said, mask=d <= last)
    tl.store(counts_N + n, last + 1)  # pyright: ignore[reportOperatorIssue]
