"""Runs a model of worker/ the way a runner does, a few sequences at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kernels.sampling import TokenMasks
from worker.cpu.executor import CpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel
from worker.parallel.groups import Groups
from worker.step.batch import InputBatch


@dataclass
class Row:
    """A sequence in the cache. `blocks` has room for all its tokens."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0


@dataclass
class ModelRun:
    """Sequences over one KV cache whose blocks are given out in random order."""

    loaded: LoadedModel
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    num_blocks: int = 256
    groups: Groups = field(default_factory=Groups)
    kept_layers: Sequence[int] = ()
    keeps_states: bool = False
    executor: CpuExecutor = field(init=False)
    _free: list[int] = field(init=False)
    # One for all steps, as in a runner: a recording made in one step is replayed in the next.
    _batch: InputBatch = field(init=False)

    def __post_init__(self) -> None:
        self.executor = CpuExecutor(self.loaded.model, self.groups, self.kept_layers, keeps_states=self.keeps_states)
        backend = replace(self.loaded.model.backend, kv_cache_dtype=self.dtype)
        self.kv_cache = KVCache(
            self.loaded.config, num_blocks=self.num_blocks, block_size=self.block_size, backend=backend
        )
        self._batch = InputBatch(
            max_tokens=self.num_blocks * self.block_size, max_rows=self.num_blocks, max_blocks=self.num_blocks
        )
        # The content of masked or stale slots must not matter.
        for layer in self.kv_cache.layers:
            layer.fill_(1e4)
        self._free = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks)).tolist()

    def row(self, token_ids: Sequence[int], room: int) -> Row:
        """A new sequence with blocks for `room` tokens."""
        return Row(list(token_ids), [self._free.pop() for _ in range(-(-room // self.block_size))])

    def step(
        self, scheduled: Sequence[tuple[Row, int]], *, last_only: bool = False, num_tokens_D: Sequence[int] = ()
    ) -> torch.Tensor:
        """Computes the next tokens of some rows in one batch. Returns float32 logits [T, V], or [S, V] of each row's
        last token. num_tokens_D: tokens of the step at each replica, if several compute it together."""
        self._schedule(scheduled, last_only=last_only)
        self._batch.num_tokens_D = num_tokens_D
        with torch.inference_mode():
            compute = self.executor.wanted if last_only else self.executor.forward
            return self.executor.logits(compute(self._batch, self.kv_cache))

    def wanted_step(
        self, scheduled: Sequence[tuple[Row, int]], places: Sequence[int], *, is_greedy: bool = False
    ) -> torch.Tensor:
        """As `step`, but returns logits [L, V] of the tokens at these places alone; if is_greedy, the likeliest tokens
        after them, int64 [L]."""
        self._schedule(scheduled, last_only=True)
        self._batch.num_logits = len(places)
        self._batch.logit_places[: len(places)] = places
        with torch.inference_mode():
            if is_greedy:
                return self.executor.greedy(self._batch, self.kv_cache)[0].clone()
            return self.executor.logits(self.executor.wanted(self._batch, self.kv_cache))

    def hidden_states(self, scheduled: Sequence[tuple[Row, int]]) -> torch.Tensor:
        """As `step`, but returns the hidden states for the next stage or for all logits, [T, E]. Valid until the next
        step."""
        self._schedule(scheduled, last_only=False)
        with torch.inference_mode():
            return self.executor.forward(self._batch, self.kv_cache)

    def greedy_step(
        self, scheduled: Sequence[tuple[Row, int]], *, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `step`, but returns only the likeliest tokens and their logits. Valid until the next step."""
        self._schedule(scheduled, last_only=last_only)
        with torch.inference_mode():
            return self.executor.greedy(self._batch, self.kv_cache)

    def masked_greedy_step(
        self, scheduled: Sequence[tuple[Row, int]], masks: TokenMasks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `greedy_step` with last_only, of the tokens that each row's mask leaves."""
        self._schedule(scheduled, last_only=True)
        with torch.inference_mode():
            return self.executor.masked_greedy(self._batch, self.kv_cache, lambda: masks)

    def _schedule(self, scheduled: Sequence[tuple[Row, int]], *, last_only: bool) -> None:
        tokens, positions, slots, starts = [], [], [], [0]
        for row, count in scheduled:
            for position in range(row.num_computed, row.num_computed + count):
                tokens.append(row.token_ids[position])
                positions.append(position)
                block = row.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            row.num_computed += count
            starts.append(len(tokens))
        tables = np.zeros((len(scheduled), max((len(row.blocks) for row, _ in scheduled), default=0)), dtype=np.int32)
        for index, (row, _) in enumerate(scheduled):
            tables[index, : len(row.blocks)] = row.blocks
        self._batch.fill(
            token_ids_T=np.array(tokens),
            positions_T=np.array(positions),
            slots_T=np.array(slots),
            query_starts=np.array(starts),
            context_lens_S=np.array([row.num_computed for row, _ in scheduled]),
            block_tables_SB=tables,
            logit_indices=np.array(starts[1:]) - 1 if last_only else np.arange(len(tokens)),
        )

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int, chunk: int = 10_000) -> list[list[int]]:
        """Greedy continuations of `max_tokens` tokens, all prompts in one batch, at most `chunk` tokens of a row per
        step. EOS does not stop them."""
        rows = [self.row(prompt, len(prompt) + max_tokens) for prompt in prompts]
        while unfinished := [
            row for row, prompt in zip(rows, prompts, strict=True) if len(row.token_ids) < len(prompt) + max_tokens
        ]:
            scheduled = [(row, min(chunk, len(row.token_ids) - row.num_computed)) for row in unfinished]
            for (row, _), logits_V in zip(scheduled, self.step(scheduled, last_only=True), strict=True):
                if row.num_computed == len(row.token_ids):
                    row.token_ids.append(int(logits_V.argmax()))
        return [row.token_ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((actual - expected).abs().max() / expected.abs().max())


def typical_error(actual_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    """As `relative_error`, but the error of the median token."""
    return float((actual_TV - expected_TV).abs().amax(dim=1).median() / expected_TV.abs().max())
