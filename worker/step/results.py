"""Turns chosen tokens into a StepResult: verifies drafts, fills columns, frames logprobs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kernels.native.library import NativeKernels
from protos import inference_pb2, step_pb2
from worker.sampling.logprobs import frames, logprobs_message
from worker.sampling.sampler import Logits, Sampled, Scores, sample
from worker.sampling.state import NO_LOGPROBS
from worker.step.inputs import Logprobs, StepOutputs
from worker.step.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Requested prompt logprobs of one row: that of targets_P[i], the prompt's token at first_position + i, after token
    first_token + i of the step."""

    sequence: int
    first_token: int
    first_position: int
    targets_P: np.ndarray  # int64
    # Number of most likely tokens to return with each.
    num_top: int


def scored_prompts(
    rows: Rows, rows_S: np.ndarray, query_starts: np.ndarray, context_lens_S: np.ndarray
) -> list[ScoredPrompt]:
    """Returns the prompt logprobs to compute in a step; call it between `Rows.advance` and `Rows.append`.

    Skips rows that came with output: their prompt logprobs were delivered before. query_starts: [S + 1];
    context_lens_S: tokens of each row that are computed after the step.
    """
    wanted_S = rows.sampling.prompt_logprobs_R[rows_S] != NO_LOGPROBS
    scored = np.flatnonzero(wanted_S & (rows.num_tokens_R[rows_S] == rows.num_prompt_tokens_R[rows_S]))
    return [_scored(rows, int(rows_S[i]), query_starts[i : i + 2], int(context_lens_S[i])) for i in scored.tolist()]


def _scored(rows: Rows, row: int, query: np.ndarray, context_len: int) -> ScoredPrompt:
    """Selects the prompt tokens that follow the step's tokens of one row."""
    start, end = query.tolist()
    first_position = context_len - (end - start) + 1
    # The last prompt token is followed by the first sampled one.
    targets = rows.token_ids_RL[row, first_position : rows.num_prompt_tokens_R[row]][: end - start]
    return ScoredPrompt(
        sequence=int(rows.sequence_R[row]),
        first_token=start,
        first_position=first_position,
        targets_P=targets.astype(np.int64),
        num_top=int(rows.sampling.prompt_logprobs_R[row]),
    )


def put_columns(
    result: step_pb2.StepResult,
    sequences_N: np.ndarray,
    positions_N: np.ndarray,
    tokens_ND1: np.ndarray,
    counts_N: np.ndarray | None,
    failed_N: np.ndarray,
    why: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Writes a result's columns: row i sampled tokens_ND1[i, : counts_N[i]], from output position positions_N[i] on.

    counts_N: None if no row has drafts, so each samples one token. Failed rows report their sequence, and the tokens
    before the one that failed, if they had drafts. why: the causes by index into N, where logits were finite. Integers
    of any width.
    """
    good_N = ~failed_N
    if counts_N is not None and failed_N.any():
        counts_N = counts_N - failed_N
        good_N = counts_N > 0
    result.sequences = sequences_N[good_N].astype("<i8").tobytes()
    result.positions = positions_N[good_N].astype("<i4").tobytes()
    if counts_N is None:
        result.token_ids = tokens_ND1[good_N, 0].astype("<i4").tobytes()
    else:
        result.num_tokens = counts_N[good_N].astype("<i4").tobytes()
        # Row after row, without the unused entries.
        is_said = (np.arange(tokens_ND1.shape[1]) < counts_N[:, None]) & good_N[:, None]
        result.token_ids = tokens_ND1[is_said].astype("<i4").tobytes()
    result.failed_sequences.extend(sequences_N[failed_N].tolist())
    if why:
        result.failure_messages.extend(why.get(i, "") for i in np.flatnonzero(failed_N).tolist())


@dataclass(slots=True, kw_only=True)
class StepTokens:
    """The tokens of one step: row i sampled tokens_ND1[i, : counts_N[i]]. logprobs: by (row, token), for rows that
    asked and did not fail."""

    tokens_ND1: np.ndarray  # int64
    counts_N: np.ndarray  # int64
    failed_N: np.ndarray  # bool: logits were not finite, or nothing was left of them
    # By row, for failed rows whose logits were finite.
    why: dict[int, str] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], inference_pb2.TokenLogprobs] = field(default_factory=dict)

    @classmethod
    def one_each(cls, tokens_N: np.ndarray) -> "StepTokens":
        """Wraps one token per row; no row has drafts, none has failed."""
        num_rows = len(tokens_N)
        return cls(
            tokens_ND1=tokens_N[:, None], counts_N=np.ones(num_rows, np.int64), failed_N=np.zeros(num_rows, np.bool_)
        )


def sample_rows(
    rows: Rows,
    rows_N: np.ndarray,
    num_drafts_N: np.ndarray | None,
    scores: Scores,
    kernels: NativeKernels | None,
) -> StepTokens:
    """Samples each row's next tokens, up to and including the first that differs from its draft, and appends them to
    the rows. The remaining drafts are dropped.

    scores: for each row, at its last token before the drafts, then at each draft. num_drafts_N: int64; None if no row
    has drafts. kernels: see worker.sampling.sampler.sample.
    """
    if num_drafts_N is None:
        num_drafts_N = np.zeros(len(rows_N), np.int64)
    rows.settle_drafts(rows_N, num_drafts_N)
    width = int(num_drafts_N.max(initial=0)) + 1
    tokens = StepTokens(
        tokens_ND1=np.zeros((len(rows_N), width), np.int64),
        counts_N=np.zeros(len(rows_N), np.int64),
        failed_N=np.zeros(len(rows_N), np.bool_),
    )
    first_N = (num_drafts_N + 1).cumsum() - (num_drafts_N + 1)
    going = np.arange(len(rows_N))
    draws = isinstance(scores, Logits) and bool((rows.sampling.filters.temperature_R[rows_N] > 0).any())
    uniform_L = _uniforms(rows, rows_N, num_drafts_N, first_N) if draws else None
    for turn in range(width):
        rows_G, scored_G = rows_N[going], first_N[going] + turn
        uniform_G = None if uniform_L is None else uniform_L[scored_G]
        sampled = sample(scores, scored_G, rows.sampling, rows_G, rows.output_positions(rows_G), kernels, uniform_G)
        going = going[_count_accepted(rows, rows_N, going, turn, sampled, tokens) & (num_drafts_N[going] > turn)]
        if not len(going):
            break
    return tokens


def _uniforms(rows: Rows, rows_N: np.ndarray, num_drafts_N: np.ndarray, first_N: np.ndarray) -> np.ndarray:
    """Returns the random numbers of all positions of a step, float64 [L]: some 40 operations of numpy, once for all
    turns."""
    row_L = np.arange(len(rows_N)).repeat(num_drafts_N + 1)
    positions_L = (rows.output_positions(rows_N) - first_N)[row_L] + np.arange(len(row_L))
    return rows.sampling.filters.uniforms(rows_N[row_L], positions_L)


def _count_accepted(
    rows: Rows, rows_N: np.ndarray, going: np.ndarray, turn: int, sampled: Sampled, tokens: StepTokens
) -> np.ndarray:
    """Appends one token to each row of rows_N[going]. Returns a mask of the rows whose token equals the draft at its
    position. Ignore it for rows without a draft there."""
    rows_G = rows_N[going]
    drafted_G = rows.token_ids_RL[rows_G, rows.num_tokens_R[rows_G]]
    # A failed row appends token 0: a step planned before the scheduler learned of the failure may name it again.
    rows.append(rows_G, sampled.token_ids_N)
    tokens.tokens_ND1[going, turn] = sampled.token_ids_N
    tokens.counts_N[going] += 1
    tokens.failed_N[going] |= sampled.failed_N
    tokens.why.update((int(going[i]), text) for i, text in sampled.why.items())
    tokens.logprobs.update(((int(going[i]), turn), entry) for i, entry in sampled.logprobs.items())
    return (drafted_G == sampled.token_ids_N) & ~sampled.failed_N


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """The part of a step's result that is known when the step begins. All arrays are int64."""

    epoch: int
    step: int
    rows_N: np.ndarray
    sequences_N: np.ndarray
    # Each row's output index of the first token that it samples.
    positions_N: np.ndarray
    # None: the plan names no drafts.
    num_drafts_N: np.ndarray | None
    # NO_LOGPROBS: the row wants none.
    num_logprobs_N: np.ndarray
    # Rows whose logprobs are those of listed tokens.
    listing_rows: frozenset[int]
    prompts: Sequence[ScoredPrompt]
    # Sequences freed by this step's plan: neither this step nor later ones name them.
    freed_sequences: Sequence[int]

    def result(self, outputs: StepOutputs, failed_N: np.ndarray, why: Mapping[int, str]) -> step_pb2.StepResult:
        """Builds the StepResult. failed_N: bool, rows whose logits were not finite, or that had no token left, in this
        step or before. why: see put_columns."""
        result = step_pb2.StepResult(epoch=self.epoch, step=self.step)
        counts_N = None if self.num_drafts_N is None else outputs.counts_N
        put_columns(result, self.sequences_N, self.positions_N, outputs.tokens_ND1, counts_N, failed_N, why)
        if outputs.logprobs is not None:
            result.logprobs.extend(self._logprobs(outputs, outputs.logprobs, failed_N))
        if outputs.prompt_logprobs is not None:
            result.prompt_logprobs.extend(self._prompt_logprobs(outputs.prompt_logprobs))
        result.timing.forward = outputs.seconds
        return result

    def _logprobs(
        self, outputs: StepOutputs, logprobs: Logprobs, failed_N: np.ndarray
    ) -> Iterator[inference_pb2.TokenLogprobs]:
        """Yields the logprobs of the sampled tokens; skips the entries at rejected drafts."""
        entries = {position: entry for entry, position in enumerate(logprobs.positions.tolist())}
        num_scored_N = np.ones_like(self.rows_N) if self.num_drafts_N is None else self.num_drafts_N + 1
        first_N = num_scored_N.cumsum() - num_scored_N
        num_kept_N = outputs.counts_N - failed_N
        for i in np.flatnonzero(self.num_logprobs_N != NO_LOGPROBS).tolist():
            for turn, token_id in enumerate(outputs.tokens_ND1[i, : num_kept_N[i]].tolist()):
                entry = entries[int(first_N[i]) + turn]
                is_ranked = int(self.rows_N[i]) not in self.listing_rows
                yield _entry(logprobs, entry, token_id, int(self.num_logprobs_N[i]), is_ranked=is_ranked)

    def _prompt_logprobs(self, logprobs: Logprobs) -> Iterator[step_pb2.RowPromptLogprobs]:
        first = 0
        for prompt in self.prompts:
            scored = [
                _entry(logprobs, entry, token_id, prompt.num_top)
                for entry, token_id in enumerate(prompt.targets_P.tolist(), first)
            ]
            first += len(scored)
            for frame in frames(prompt.first_position, scored):
                yield step_pb2.RowPromptLogprobs(sequence=prompt.sequence, frame=frame)


def _entry(
    logprobs: Logprobs, entry: int, token_id: int, num_top: int, *, is_ranked: bool = True
) -> inference_pb2.TokenLogprobs:
    """Makes one message. num_top: what this row asked for; the arrays are as wide as the largest request."""
    return logprobs_message(
        token_id,
        float(logprobs.chosen[entry]),
        int(logprobs.ranks[entry]),
        logprobs.top_ids_K[entry, :num_top].tolist(),
        logprobs.top_K[entry, :num_top].tolist(),
        is_ranked=is_ranked,
    )
