"""A one-page scheduler for requests of known lengths, so that the engine is what is measured.

Legend: R rows, one a request, S rows of a step, T its tokens, N of its rows that sample, O output tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.sampling.features import RowSampling
from worker.step.inputs import LAST_SAMPLED, StepInputs, StepOutputs, TableChanges


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request that no token ends."""

    prompt: np.ndarray  # int32
    num_outputs: int

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is needed: all but the last output."""
        return len(self.prompt) + self.num_outputs - 1


def random_requests(
    count: int, vocab_size: int, *, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0
) -> list[Request]:
    """Draws requests. prompts, outputs: the least and the most tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(vocab_size, size=rng.integers(prompts[0], prompts[1] + 1)).astype(np.int32),
            int(rng.integers(outputs[0], outputs[1] + 1)),
        )
        for _ in range(count)
    ]


def num_blocks_of(requests: Sequence[Request], block_size: int) -> int:
    """Blocks that the requests need, including the null block."""
    return 1 + sum(-(-request.num_tokens // block_size) for request in requests)


class Schedule:
    """Plans steps: each takes all rows that decode, then prompts in order while the budget lasts, the last one in part.
    Every request has a row and all its blocks from the beginning."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        num_computed: int = 0,
    ) -> None:
        """num_computed: tokens of each prompt that count as computed, whatever the cache holds.

        Raises ValueError for fewer blocks than the requests need.
        """
        needed = num_blocks_of(requests, block_size)
        if needed > num_blocks:
            raise ValueError(f"num_blocks={num_blocks}: these requests need {needed}")
        self._requests, self._budget = requests, max_num_batched_tokens
        self._prompt_lens_R = np.array([len(request.prompt) for request in requests], np.int32)
        self._num_tokens_R = np.array([request.num_tokens for request in requests], np.int32)
        self._computed_R = np.full(len(requests), num_computed, np.int32)
        self._num_started = 0
        # The prompts of all rows before this one are computed.
        self._prompt_row = 0
        self._finished: list[int] = []
        num_blocks_R = -(-self._num_tokens_R // block_size)
        # Blocks in random order, as after hours of serving.
        order = np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32) + 1
        self._blocks_R = np.split(order[: needed - 1], num_blocks_R.cumsum()[:-1])
        # Sampled tokens; -1: not yet sampled.
        self.tokens_RO = np.full((len(requests), max(request.num_outputs for request in requests)), -1, np.int32)

    @property
    def is_done(self) -> bool:
        """True once every token is in some step."""
        return bool((self._computed_R == self._num_tokens_R).all())

    def next(self) -> StepInputs:
        """Returns the next step, whether or not the steps before it have been computed."""
        is_decoding_R = (self._computed_R >= self._prompt_lens_R) & (self._computed_R < self._num_tokens_R)
        decodes = np.flatnonzero(is_decoding_R).astype(np.int32)
        assert len(decodes) <= self._budget, "a step takes all decodes"
        chunks = self._chunks(self._budget - len(decodes))
        rows_S = np.concatenate((decodes, np.array([row for row, _ in chunks], np.int32)))
        lengths_S = np.array([1] * len(decodes) + [len(tokens) for _, tokens in chunks], np.int32)
        contexts_S = self._computed_R[rows_S] + lengths_S
        self._computed_R[rows_S] = contexts_S
        sampling_N = np.flatnonzero(contexts_S >= self._prompt_lens_R[rows_S]).astype(np.int32)
        sampling_rows_N = rows_S[sampling_N]
        new_rows = range(self._num_started, int(rows_S.max()) + 1)
        freed, self._finished = self._finished, rows_S[contexts_S == self._num_tokens_R[rows_S]].tolist()
        self._num_started = max(self._num_started, new_rows.stop)
        return StepInputs(
            rows_S=rows_S,
            query_starts=np.concatenate(([0], lengths_S.cumsum())).astype(np.int32),
            context_lens_S=contexts_S,
            token_ids_T=np.concatenate((np.full(len(decodes), LAST_SAMPLED, np.int32), *(part for _, part in chunks))),
            sampling_N=sampling_N,
            output_positions_N=contexts_S[sampling_N] - self._prompt_lens_R[sampling_rows_N],
            freed_rows=freed,
            new_rows=[RowSampling(row=row) for row in new_rows],
            table_changes=self._tables(new_rows) if new_rows else None,
        )

    def take(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        """Takes the results of a step from `next`. Raises ValueError if its logits were not finite."""
        tokens_N = outputs.tokens_ND1[:, 0]
        if (outputs.counts_N != 1).any() or (tokens_N < 0).any():
            raise ValueError(f"rows {inputs.rows_S[inputs.sampling_N][tokens_N < 0]} have logits that are not finite")
        self.tokens_RO[inputs.rows_S[inputs.sampling_N], inputs.output_positions_N] = tokens_N

    def _chunks(self, budget: int) -> list[tuple[int, np.ndarray]]:
        """Returns the next rows to prefill, each with the tokens of its prompt."""
        chunks: list[tuple[int, np.ndarray]] = []
        while budget and self._prompt_row < len(self._requests):
            row, done = self._prompt_row, int(self._computed_R[self._prompt_row])
            tokens = self._requests[row].prompt[done : done + budget]
            chunks.append((row, tokens))
            budget -= len(tokens)
            if done + len(tokens) == self._prompt_lens_R[row]:
                self._prompt_row += 1
        return chunks

    def _tables(self, rows: range) -> TableChanges:
        blocks = [self._blocks_R[row] for row in rows]
        return TableChanges(
            rows_C=np.repeat(np.array(rows, np.int32), [len(ids) for ids in blocks]),
            places_C=np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in blocks]),
            block_ids_C=np.concatenate(blocks),
        )
