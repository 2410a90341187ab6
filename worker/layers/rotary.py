"""Rotary embeddings: the frequencies of a config, and the cosines and sines of a step."""

import math
from collections.abc import Sequence

import torch

from kernels.backend import Backend
from kernels.elementwise.rope import CosSinTable
from worker.layers.forward_context import Workspace
from worker.model_config import RopeConfig


class Rotary:
    """Cosines and sines of a step's positions, computed in each step: a table for the longest context would take much
    memory and save little time."""

    def __init__(
        self,
        ropes: Sequence[RopeConfig],
        rope_size: int,
        backend: Backend,
        head_size: int | None = None,
        sections: tuple[int, int, int] | None = None,
    ) -> None:
        """ropes: all different ropes of the model's layers. rope_size: numbers of a head that they rotate. head_size:
        None: they rotate all. sections: pairs of each axis; None: positions have one axis."""
        self._sections = sections
        num_pairs = (head_size or rope_size) // 2
        self._tables = [
            (f"cos_sin {i}", CosSinTable(backend, rope_frequencies(rope, rope_size), rope.attention_factor, num_pairs))
            for i, rope in enumerate(ropes)
        ]

    def __call__(self, positions_T: torch.Tensor, workspace: Workspace) -> tuple[torch.Tensor, ...]:
        """Returns a table for each rope, as kernels.kv_cache.write takes them, in the workspace. positions_T: [T], or
        [3, T] (M-RoPE)."""
        if positions_T.dim() == 1:
            return tuple(self._fill(name, table, positions_T, workspace) for name, table in self._tables)
        return tuple(self._of_axes(name, table, positions_T, workspace) for name, table in self._tables)

    @staticmethod
    def _fill(name: str, table: CosSinTable, positions_T: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        return table(positions_T, workspace.take(name, len(positions_T), *table.shape, dtype=table.dtype))

    def _of_axes(self, name: str, table: CosSinTable, positions_AT: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Takes each pair's cosine and sine from the table of its axis, so that they have the bits of equal axes."""
        assert self._sections is not None, "positions have one axis"
        out = self._fill(name, table, positions_AT[0], workspace)
        end = self._sections[0]
        for positions_T, count in zip(positions_AT[1:], self._sections[1:], strict=True):
            first, end = end, end + count
            of_axis = self._fill(f"{name} of an axis", table, positions_T, workspace)
            # On a GPU, the sines of all pairs follow the cosines.
            starts = (first,) if table.dtype is torch.complex64 else (first, first + table.shape[0] // 2)
            for start in starts:
                out[..., start : start + count] = of_axis[..., start : start + count]
        return out


def rope_frequencies(config: RopeConfig, head_size: int) -> torch.Tensor:
    """Returns float32 [head size / 2], in radians per token. Raises ValueError for another number of freq_factors."""
    if config.scaling == "none":
        return torch.zeros(head_size // 2)
    theta = _dynamic_theta(config, head_size) if config.scaling == "dynamic" else config.theta
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        frequencies = _llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _yarn(frequencies, config, head_size)
    factors = config.freq_factors
    if config.scaling == "longrope":
        factors = config.long_factors if config.is_long else config.short_factors
    if factors is not None:
        if len(factors) != head_size // 2:
            expected = head_size // 2
            raise ValueError(
                f"{len(factors)} rope factors: there must be half the numbers that rope rotates, {expected}"
            )
        frequencies = frequencies / torch.tensor(factors)
    return frequencies


def _dynamic_theta(config: RopeConfig, rope_size: int) -> float:
    """Dynamic NTK scaling (reddit.com/r/LocalLLaMA, bloc97 and emozilla, as in transformers) for sequences of
    config.length tokens: up to the trained context nothing changes."""
    context = config.original_max_position_embeddings
    stretched = config.factor * max(config.length, context) / context - (config.factor - 1)
    return config.theta * stretched ** (rope_size / (rope_size - 2))


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    turns_in_context = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns_in_context - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, config: RopeConfig, head_size: int) -> torch.Tensor:
    """YaRN's "NTK by parts" (arXiv 2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        wavelength = config.original_max_position_embeddings / (times * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / config.factor * stretched + frequencies * (1 - stretched)
