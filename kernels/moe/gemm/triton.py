"""Mixture of experts on a GPU: gate and up with an activation, down, and the sum weighted by the router.

Computes in bf16 or fp16, or with e4m3 weights in blocks of 128 x 128 and activations quantized in groups of 128
numbers, both as in kernels.gemm.quantize. No sum uses atomics: each row is added up in the order of K, and the experts
of a token in the order of its routing.

T tokens, K experts of a token, E experts, H hidden size, I size of an expert's MLP, N = T * K pairs; BM, BN, BK a tile.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import triton.language as tl

from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.elementwise.silu_mul.triton import ACTIVATIONS, gated
from kernels.gemm.fp8.choose import device_of
from kernels.gemm.quantize.triton import quantize_groups
from kernels.moe.align.triton import AlignedPairs, align
from kernels.moe.gemm.tiles import INVARIANT, MoeTile, tile_for, tuned_tile
from kernels.triton_common.integers import cdiv
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, narrow, tile_of_program, widen

# Rows and columns of a block-quantized weight, and columns of activations, that share a scale.
GROUP = 128
# Numbers of a token per program of the sum: with 4 warps a 16-byte vector of bf16 a thread.
_COMBINE_TILE, _COMBINE_WARPS = 1024, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Weights of this rank's experts, contiguous: bf16, fp16, or e4m3 with float32 scales per block of 128 x 128."""

    gate_up_E2IH: torch.Tensor  # the gate's rows, then up's
    down_EHI: torch.Tensor
    gate_up_scales: torch.Tensor | None = None  # [E, 2I / 128, H / 128]
    down_scales: torch.Tensor | None = None  # [E, H / 128, I / 128]
    gate_up_bias_E2I: torch.Tensor | None = None  # of the weights' dtype, not for e4m3
    down_bias_EH: torch.Tensor | None = None
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        num_experts, rows, hidden_size = self.gate_up_E2IH.shape
        size = rows // 2
        if self.down_EHI.shape != (num_experts, hidden_size, size):
            raise ValueError(
                f"down_EHI is {tuple(self.down_EHI.shape)}; gate_up_E2IH of {tuple(self.gate_up_E2IH.shape)} goes with "
                f"{(num_experts, hidden_size, size)}"
            )
        biases = (self.gate_up_bias_E2I, (num_experts, rows)), (self.down_bias_EH, (num_experts, hidden_size))
        for bias, shape in biases:
            if bias is not None and (bias.shape != shape or not bias.is_contiguous()):
                raise ValueError(f"biases of shape {tuple(bias.shape)}; {shape}, contiguous, is needed")
        is_fp8 = self.gate_up_E2IH.dtype is torch.float8_e4m3fn
        if not is_fp8 and (self.gate_up_scales is not None or self.down_scales is not None):
            raise ValueError(f"scales are for e4m3 weights; these are {self.gate_up_E2IH.dtype}")
        if not is_fp8:
            return
        if size % GROUP or hidden_size % GROUP:
            raise ValueError(f"e4m3 experts of size {size} and hidden size {hidden_size}; multiples of {GROUP} work")
        groups, hidden_groups = size // GROUP, hidden_size // GROUP
        for name, scales, shape in (
            ("gate_up_scales", self.gate_up_scales, (num_experts, 2 * groups, hidden_groups)),
            ("down_scales", self.down_scales, (num_experts, hidden_groups, groups)),
        ):
            if scales is None or scales.shape != shape:
                found = None if scales is None else tuple(scales.shape)
                raise ValueError(f"{name} is {found}; e4m3 weights need {shape}")
            assert scales.is_contiguous()


def run_experts(
    x_TH: torch.Tensor,
    experts: Experts,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    *,
    num_experts: int | None = None,
    batch_invariant: bool = False,
    tile: MoeTile | None = None,
    tuned_folder: str | Path | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [T, H] in x's dtype, the sum over k of weights_TK[t, k] * down(activation(gate(x_t)) * up(x_t)),
    of expert experts_TK[t, k].

    x_TH: bf16 or fp16, the experts' dtype unless that is e4m3, contiguous. weights_TK: float32. experts_TK: int32, this
    rank's index of an expert, or -1 if another rank has it or the token is padding: such pairs add nothing, and a token
    with no other pairs gets 0. Sums are float32; values between the GEMMs, and a pair's result, have x's dtype.
    num_experts: on all ranks, for the mean number of pairs per expert; None: this rank's. tile: if None, with
    batch_invariant one tile for all batches, so that a token's result never depends on other tokens; otherwise the
    tuned one (tiles.py; tuned_folder comes before its other folders), or one chosen by shapes. out: memory for the
    result, like x.

    Raises ValueError for dtypes that do not fit together, and TunedConfigError for a malformed configuration.
    """
    num_tokens, hidden_size = x_TH.shape
    num_local_experts, _, size = experts.down_EHI.shape
    top_k = experts_TK.shape[1]
    is_fp8 = experts.down_EHI.dtype is torch.float8_e4m3fn
    if x_TH.dtype is not experts.down_EHI.dtype and not is_fp8:
        raise ValueError(
            f"x of {x_TH.dtype} and experts of {experts.down_EHI.dtype}; both must be the same, or experts e4m3"
        )
    assert x_TH.is_contiguous()
    assert experts.gate_up_E2IH.is_contiguous()
    assert experts.down_EHI.is_contiguous()
    out_TH = torch.empty_like(x_TH) if out is None else out
    if (out_TH.shape, out_TH.dtype) != (x_TH.shape, x_TH.dtype) or not out_TH.is_contiguous():
        raise ValueError(
            f"out is {out_TH.dtype} {tuple(out_TH.shape)}; {x_TH.dtype} {tuple(x_TH.shape)}, contiguous, is needed"
        )
    if not num_tokens:
        return out_TH
    num_pairs = num_tokens * top_k
    if tile is None and batch_invariant:
        tile = INVARIANT
    elif tile is None:
        device = device_of(x_TH.device)
        # The interpreter has no tuned tiles.
        if device.capability:
            tile = tuned_tile(num_tokens, num_local_experts, size, device.name, is_fp8=is_fp8, folder=tuned_folder)
        tile = tile or tile_for(num_pairs, num_experts or num_local_experts)
    pairs = align(experts_TK, num_local_experts, tile.block_m)
    gated_NI = torch.empty(num_pairs, size, dtype=x_TH.dtype, device=x_TH.device)
    _grouped_gemm(
        x_TH,
        experts.gate_up_E2IH,
        experts.gate_up_scales,
        experts.gate_up_bias_E2I,
        gated_NI,
        pairs,
        tile,
        top_k=top_k,
        activation=experts.activation,
    )
    down_NH = torch.empty(num_pairs, hidden_size, dtype=x_TH.dtype, device=x_TH.device)
    _grouped_gemm(
        gated_NI,
        experts.down_EHI,
        experts.down_scales,
        experts.down_bias_EH,
        down_NH,
        pairs,
        tile,
        top_k=1,
    )
    _combine_kernel[(num_tokens, cdiv(hidden_size, _COMBINE_TILE))](
        down_NH,
        weights_TK,
        experts_TK,
        out_TH,
        hidden_size,
        TOP_K=top_k,
        TILE=_COMBINE_TILE,
        num_warps=_COMBINE_WARPS,
    )
    return out_TH


def _grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pairs: AlignedPairs,
    tile: MoeTile,
    *,
    top_k: int,
    activation: Activation | None = None,
) -> None:
    """Computes row p of out from row p // top_k of x, for each pair p with an expert; other rows stay unchanged.
    activation: None: not gated."""
    is_gated = activation is not None
    x_scales = None
    if weight_scales is not None:
        x, x_scales = quantize_groups(x)
    num_blocks, columns, depth = len(pairs.block_experts_B), out.shape[1], x.shape[1]
    block_n = tile.gated_block_n if is_gated else tile.down_block_n
    block_k = tile.depth_bytes // x.element_size()
    _grouped_gemm_kernel[(num_blocks * cdiv(columns, block_n),)](
        x,
        weight,
        out,
        x_scales,
        weight_scales,
        bias,
        pairs.pairs_BM,
        pairs.block_experts_B,
        num_blocks,
        columns,
        depth,
        *((0, 0) if x_scales is None else x_scales.stride()),
        TOP_K=top_k,
        GATED=is_gated,
        ACTIVATION=ACTIVATIONS[activation or "silu"],
        IS_FP8=x_scales is not None,
        EVEN_K=depth % block_k == 0,
        GROUP_M=tile.group_m,
        BLOCK_M=pairs.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@jit
def _load_scales(
    x_scale, w_scale, up_scale_rows, group, group_stride, has_row, IS_FP8: tl.constexpr, GATED: tl.constexpr
):
    """Loads the scales of 128 columns of x's rows, and of their weight blocks: gate's or down's, and up's."""
    a_scale, b_scale, up_scale = 1.0, 1.0, 1.0
    if IS_FP8:
        a_scale = tl.load(x_scale + (group + tl.zeros((), tl.int64)) * group_stride, mask=has_row, other=0.0)
        b_scale = tl.load(w_scale + group)
        if GATED:
            up_scale = tl.load(w_scale + up_scale_rows + group)
    return a_scale, b_scale, up_scale


@jit(do_not_specialize=["num_blocks", "x_scale_group_stride"])
def _grouped_gemm_kernel(
    x,
    weight,
    out,
    x_scales,
    weight_scales,
    bias,
    pairs_BM,
    block_experts_B,
    num_blocks,
    N,
    K,
    x_scale_row_stride,
    x_scale_group_stride,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_FP8: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """N: columns of the result. Rows without a pair are not read: if they all read token 0, they slow each other down.
    Columns beyond N repeat others, so that weights need no mask."""
    block, tile_n = tile_of_program(num_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert = tl.load(block_experts_B + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_BM + block * BLOCK_M + tl.arange(0, BLOCK_M))
    has_row = pair >= 0
    x_row = (pair // TOP_K).to(tl.int64)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + x_row[:, None] * K + k[None]
    if GATED:
        rows_of_expert = 2 * N
    else:
        rows_of_expert = N
    w_tile = weight + (expert * rows_of_expert + column % N)[None] * K + k[:, None]
    up_rows = N.to(tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    x_scale = x_scales
    w_scale = weight_scales
    up_scale_rows = N // 128 * (K // 128)
    if IS_FP8:
        x_scale = x_scales + x_row * x_scale_row_stride
        # A tile's columns are within one block of the weight.
        w_scale = weight_scales + (expert * (rows_of_expert // 128) + tile_n * BLOCK_N // 128) * (K // 128)

    steps = tl.cdiv(K, BLOCK_K)
    # Triton prefetches the operands of a dot, but not scales: here they are loaded one step ahead.
    a_scale, b_scale, up_scale = _load_scales(
        x_scale, w_scale, up_scale_rows, 0, x_scale_group_stride, has_row, IS_FP8, GATED
    )
    for step in range(steps):
        ahead = tl.minimum(step + 1, steps - 1) * BLOCK_K // 128
        next_a, next_b, next_up = _load_scales(
            x_scale, w_scale, up_scale_rows, ahead, x_scale_group_stride, has_row, IS_FP8, GATED
        )
        if EVEN_K:
            a = tl.load(x_tile, mask=has_row[:, None], other=0.0)
            b = tl.load(w_tile)
        else:
            a = tl.load(x_tile, mask=has_row[:, None] & (step * BLOCK_K + k < K)[None], other=0.0)
            b = tl.load(w_tile, mask=(step * BLOCK_K + k < K)[:, None], other=0.0)
        if IS_FP8:
            product = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            acc += product * (a_scale * b_scale)[:, None]
        else:
            acc = dot(a, b, acc)
        if GATED:
            if EVEN_K:
                up = tl.load(w_tile + up_rows)
            else:
                up = tl.load(w_tile + up_rows, mask=(step * BLOCK_K + k < K)[:, None], other=0.0)
            if IS_FP8:
                product = dot(a, up, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                up_acc += product * (a_scale * up_scale)[:, None]
            else:
                up_acc = dot(a, up, up_acc)
        a_scale, b_scale, up_scale = next_a, next_b, next_up
        x_tile += BLOCK_K
        w_tile += BLOCK_K

    if bias is not None:
        bias_of_expert = bias + expert * rows_of_expert + column % N
        acc += widen(tl.load(bias_of_expert))[None]
        if GATED:
            up_acc += widen(tl.load(bias_of_expert + N))[None]
    if GATED and ACTIVATION == 0:
        # Beyond the bound exp would overflow; the quotient is 0 either way.
        acc = acc / (1.0 + tl.exp(tl.minimum(-acc, 87.0))) * up_acc
    elif GATED:
        acc = gated(acc, up_acc, ACTIVATION)
    out_tile = out + pair.to(tl.int64)[:, None] * N + column[None]
    tl.store(out_tile, narrow(acc, out.dtype.element_ty), mask=has_row[:, None] & (column < N)[None])


@jit
def _combine_kernel(down_NH, weights_TK, experts_TK, out_TH, hidden_size, TOP_K: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        # Rows without an expert were not written, and their weights are arbitrary.
        is_here = tl.load(experts_TK + pair) >= 0
        end = tl.where(is_here, hidden_size, 0)
        weight = tl.where(is_here, tl.load(weights_TK + pair), 0.0)
        acc += weight * widen(tl.load(down_NH + pair * hidden_size + column, mask=column < end, other=0.0))
    tl.store(out_TH + token * hidden_size + column, narrow(acc, out_TH.dtype.element_ty), mask=column < hidden_size)
