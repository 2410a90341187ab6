"""Layers with a state in plain PyTorch, token by token: what the C++ kernel computes, in the dtype of the inputs.

Legend: T tokens, H heads, G groups, K numbers of a key, V of a value, C channels, W taps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.plan import StepRows
from kernels.attention.recurrent.shape import RecurrentShape, padded


class RecurrentWeights(NamedTuple):
    """One rank's weights of a layer, float32; see RecurrentLayer of recurrent.h."""

    taps_WC: torch.Tensor
    bias_C: torch.Tensor | None
    # A state decays by exp(rate * step).
    rate_H: torch.Tensor
    step_bias_H: torch.Tensor
    # Factor of the values that are added to the result; None: they are not.
    skip_H: torch.Tensor | None
    norm: torch.Tensor  # [H * V]
    eps: float
    steps: tuple[float, float]  # the least and the most


class _Token(NamedTuple):
    place: int
    # The slot that holds the state before the token; None: it is the sequence's first.
    before: int | None
    slot: int


def recurrent(
    shape: RecurrentShape, weights: RecurrentWeights, x_TF: torch.Tensor, cache: torch.Tensor, step: StepRows
) -> torch.Tensor:
    """Returns the results, [T, H * V], and advances the states in `cache`, [blocks, shape.slot]."""
    out = torch.empty(len(x_TF), shape.results, dtype=x_TF.dtype)
    sizes = [shape.channels, shape.results, x_TF.shape[1] - shape.channels - shape.results]
    for token in _tokens(step):
        channels_C, gate, scalars = x_TF[token.place].split(sizes)
        old = torch.zeros_like(cache[token.slot]) if token.before is None else cache[token.before]
        window_WC = old[: shape.window].view(-1, shape.padded_channels)[:, : shape.channels].to(x_TF.dtype)
        state_HKV = old[shape.window :].view(shape.num_heads, shape.key_size, -1)[..., : shape.value_size]
        window_WC = torch.cat((window_WC, channels_C[None]))
        mixed_C = (weights.taps_WC.to(x_TF.dtype) * window_WC).sum(0)
        mixed_C = F.silu(mixed_C if weights.bias_C is None else mixed_C + weights.bias_C)
        result_HV, state_HKV = _advance(shape, weights, mixed_C, scalars, state_HKV.to(x_TF.dtype))
        out[token.place] = _gated_norm(shape, weights, result_HV.flatten(), gate)
        _put(shape, cache[token.slot], window_WC[1:], state_HKV)
    return out


def _tokens(step: StepRows) -> Iterator[_Token]:
    starts, size = step.query_starts, step.block_size
    for row, context in enumerate(step.context_lens.tolist()):
        table: np.ndarray = step.block_tables[row]
        for index in range(int(starts[row]), int(starts[row + 1])):
            position = context - int(starts[row + 1]) + index
            before = int(table[(position - 1) // size]) if position else None
            yield _Token(index, before, int(table[position // size]))


def _advance(
    shape: RecurrentShape,
    weights: RecurrentWeights,
    mixed_C: torch.Tensor,
    scalars: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token's result and the state after it."""
    values, keys, queries = mixed_C.split([shape.results, shape.keys, shape.keys])
    value_HV = values.view(shape.num_heads, -1)
    per_group = shape.num_heads // shape.num_groups
    key_HK, query_HK = (x.view(shape.num_groups, -1).repeat_interleave(per_group, 0) for x in (keys, queries))
    step_H = F.softplus(scalars[: shape.num_heads] + weights.step_bias_H).clamp(*weights.steps)
    state_HKV = state_HKV * (weights.rate_H * step_H).exp()[:, None, None]
    if shape.rule == "delta":
        key_HK, query_HK = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (key_HK, query_HK))
        query_HK = query_HK * shape.key_size**-0.5
        known_HV = (state_HKV * key_HK[..., None]).sum(1)
        added_HV = (value_HV - known_HV) * scalars[shape.num_heads :].sigmoid()[:, None]
    else:
        added_HV = value_HV * step_H[:, None]
    state_HKV = state_HKV + key_HK[..., None] * added_HV[:, None]
    result_HV = (state_HKV * query_HK[..., None]).sum(1)
    if weights.skip_H is not None:
        result_HV = result_HV + weights.skip_H[:, None] * value_HV
    return result_HV, state_HKV


def _gated_norm(
    shape: RecurrentShape, weights: RecurrentWeights, result: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    gate = F.silu(gate)
    if shape.rule == "mamba2":
        result = result * gate
    parts = result.view(-1, shape.norm_size)
    normed = (parts * (parts.square().mean(-1, keepdim=True) + weights.eps).rsqrt()).flatten() * weights.norm
    return normed if shape.rule == "mamba2" else normed * gate


def _put(shape: RecurrentShape, slot: torch.Tensor, window_WC: torch.Tensor, state_HKV: torch.Tensor) -> None:
    slot[: shape.window].view(-1, shape.padded_channels)[:, : shape.channels] = window_WC
    matrix = slot[shape.window :].view(shape.num_heads, shape.key_size, padded(shape.value_size))
    matrix[..., : shape.value_size] = state_HKV
