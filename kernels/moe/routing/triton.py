"""Routing of tokens to experts on a GPU.

T tokens, E experts, K experts of a token, G groups of experts.
"""

import torch
import triton.language as tl

from kernels.moe.routing import Scoring
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import widen

# One warp per token, whose reductions over up to 512 experts then need no shared memory.
TOKENS, NUM_WARPS = 4, 4
MAX_EXPERTS = 1024

# Keys of `_ordered`: the lowest marks experts that cannot be chosen, the next one NaN.
_NEVER = tl.constexpr(-(1 << 31))
_OF_NAN = tl.constexpr(-(1 << 31) + 1)


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    scaling_factor: float = 1.0,
    local_experts_E: torch.Tensor | None = None,
    num_tokens_1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights_TK float32, experts_TK int32) of each token's top_k experts, best first, ties by lower index.

    logits_TE: float32, bf16 or fp16, contiguous in the last dim. Scores are softmax or sigmoid of them, in float32.
    Weights are the scores of the chosen experts, divided by their sum if renormalize, times scaling_factor. bias_E:
    float32, added to the scores only for the choice (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). With num_groups,
    successive experts form groups, and experts are chosen from the top_k_groups best groups: ranked by the sum of a
    group's two best scores with a bias (DeepSeek-V3), by its best without (DeepSeek-V2, arXiv 2405.04434).
    local_experts_E: int32, each expert's index on this rank, or -1 if another rank has it; experts_TK then has these
    indices. num_tokens_1: int32 on the device; tokens from that one on are padding: weights 0, experts -1.

    A token with NaN among its logits gets experts in range; its weights may be NaN.

    Raises ValueError if num_groups does not divide the experts, or a token cannot get top_k experts.
    """
    num_tokens, num_experts = logits_TE.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts; routing supports at most {MAX_EXPERTS}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide {num_experts} experts")
    if not 0 < top_k_groups <= num_groups:
        raise ValueError(f"top_k_groups={top_k_groups}; 1 to num_groups={num_groups} is valid")
    group_size = num_experts // num_groups
    if not 0 < top_k <= top_k_groups * group_size:
        raise ValueError(f"top_k={top_k}; 1 to {top_k_groups * group_size}, the experts to choose from, is valid")
    assert logits_TE.stride(1) == 1
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits_TE.device)
    if num_tokens:
        _route_kernel[(cdiv(num_tokens, TOKENS),)](
            logits_TE,
            bias_E,
            local_experts_E,
            num_tokens_1,
            weights_TK,
            experts_TK,
            num_tokens,
            logits_TE.stride(0),
            scaling_factor,
            SOFTMAX=scoring == "softmax",
            RENORMALIZE=renormalize,
            HAS_BIAS=bias_E is not None,
            IS_MAPPED=local_experts_E is not None,
            IS_PADDED=num_tokens_1 is not None,
            GROUPS=num_groups,
            TOP_GROUPS=top_k_groups,
            GROUP_SIZE=group_size,
            TOP_K=top_k,
            GROUPS_2=next_power_of_2(num_groups),
            GROUP_SIZE_2=next_power_of_2(group_size),
            TOP_K_2=next_power_of_2(top_k),
            TOKENS=TOKENS,
            num_warps=NUM_WARPS,
        )
    return weights_TK, experts_TK


# Wrappers whose results type checkers know to be tensors.
@jit
def _max(x, axis: tl.constexpr):
    return tl.max(x, axis)


@jit
def _min(x, axis: tl.constexpr):
    return tl.min(x, axis)


@jit
def _sum(x, axis: tl.constexpr):
    return tl.sum(x, axis)


@jit
def _ordered(x):
    """Returns int32 keys with the order of float32 x; NaN is below all."""
    bits = x.to(tl.int32, bitcast=True)
    # +0 and -0 are equal.
    bits = tl.where(x == 0.0, 0, bits)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _OF_NAN)


@jit
def _best(keys, ids):
    """Returns the lowest id among each row's largest keys."""
    return _min(tl.where(keys == _max(keys, 1)[:, None], ids, 1 << 30), 1)


@jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_TE,
    bias_E,
    local_experts_E,
    num_tokens_1,
    weights_TK,
    experts_TK,
    num_tokens,
    stride,
    scaling_factor,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_MAPPED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS_2: tl.constexpr,  # the next powers of two
    GROUP_SIZE_2: tl.constexpr,
    TOP_K_2: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = tokens < num_tokens
    # A group is padded to a power of two of experts; ids still ascend.
    places = tl.arange(0, GROUPS_2 * GROUP_SIZE_2)
    groups, in_group = places // GROUP_SIZE_2, places % GROUP_SIZE_2
    ids = groups * GROUP_SIZE + in_group
    exist = (groups < GROUPS) & (in_group < GROUP_SIZE)
    logits = widen(
        tl.load(
            logits_TE + tokens.to(tl.int64)[:, None] * stride + ids[None],
            mask=there[:, None] & exist[None],
            other=float("-inf"),
        )
    )
    if SOFTMAX:
        # NaN stays in its own score and in the sum.
        largest = _max(tl.where(logits == logits, logits, float("-inf")), 1)
        exponentials = tl.exp(logits - tl.where(largest > float("-inf"), largest, 0.0)[:, None])
        total = _sum(exponentials, 1)
        scores = exponentials / tl.where(total == 0, 1.0, total)[:, None]
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    # Different logits may have equal scores: unlikely experts do, and a sigmoid is 1 from 17 on.
    wanted = logits
    if HAS_BIAS:
        wanted = scores + tl.load(bias_E + ids, mask=exist, other=0.0)[None]
    keys = tl.where(exist[None], _ordered(wanted), _NEVER)
    if TOP_GROUPS < GROUPS:
        keys = _leave_best_groups(
            wanted, keys, ids, groups, HAS_BIAS, GROUPS_2, GROUP_SIZE_2, GROUPS, TOP_GROUPS, TOKENS
        )

    ranks = tl.arange(0, TOP_K_2)
    chosen = tl.zeros((TOKENS, TOP_K_2), tl.int32)
    weights = tl.zeros((TOKENS, TOP_K_2), tl.float32)
    for i in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        best = _best(keys, ids[None])
        is_best = exist[None] & (ids[None] == best[:, None])
        weight = _sum(tl.where(is_best, scores, 0.0), 1)
        chosen = tl.where((ranks == i)[None], best[:, None], chosen)
        weights = tl.where((ranks == i)[None], weight[:, None], weights)
        keys = tl.where(is_best, _NEVER, keys)
    if RENORMALIZE:
        total = _sum(weights, 1)
        weights = weights / tl.where(total > 0, total, 1.0)[:, None]
    weights = weights * scaling_factor
    written = there[:, None] & (ranks < TOP_K)[None]
    if IS_MAPPED:
        chosen = tl.load(local_experts_E + chosen, mask=written, other=-1)
    if IS_PADDED:
        is_real = (tokens < tl.load(num_tokens_1))[:, None]
        chosen = tl.where(is_real, chosen, -1)
        weights = tl.where(is_real, weights, 0.0)
    outputs = tokens[:, None] * TOP_K + ranks[None]
    tl.store(weights_TK + outputs, weights, mask=written)
    tl.store(experts_TK + outputs, chosen, mask=written)


@jit
def _leave_best_groups(
    wanted,
    keys,
    ids,
    groups,
    BY_TWO: tl.constexpr,
    GROUPS_2: tl.constexpr,
    GROUP_SIZE_2: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Returns keys with experts outside the best groups marked as never chosen."""
    group_ids = tl.arange(0, GROUPS_2)
    best_keys = tl.reshape(keys, (TOKENS, GROUPS_2, GROUP_SIZE_2))
    group_keys = _max(best_keys, 2)
    if BY_TWO:
        # The best two; the second may equal the first.
        numbers = tl.reshape(wanted, (TOKENS, GROUPS_2, GROUP_SIZE_2))
        places = tl.arange(0, GROUP_SIZE_2)[None, None]
        first = _min(tl.where(best_keys == group_keys[:, :, None], places, GROUP_SIZE_2), 2)
        is_first = places == first[:, :, None]
        rest = tl.where(is_first, _NEVER, best_keys)
        second = _min(tl.where(rest == _max(rest, 2)[:, :, None], places, GROUP_SIZE_2), 2)
        two = is_first | (places == second[:, :, None])
        group_keys = _ordered(_sum(tl.where(two, numbers, 0.0), 2))
    group_keys = tl.where((group_ids < GROUPS)[None], group_keys, _NEVER)
    is_open = tl.zeros((TOKENS, GROUPS_2 * GROUP_SIZE_2), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):  # pyright: ignore[reportGeneralTypeIssues]
        best = _best(group_keys, group_ids[None])
        is_open += (groups[None] == best[:, None]).to(tl.int32)
        group_keys = tl.where(group_ids[None] == best[:, None], _NEVER, group_keys)
    return tl.where(is_open > 0, keys, _NEVER)
