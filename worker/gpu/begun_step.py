"""What the host remembers of a step until the device has told its tokens: rows may be others' by then.

Shape suffixes: N sampling rows, D drafts of the longest row, L scored positions (a sampling row's drafts, and 1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protos import inference_pb2, step_pb2
from worker.gpu.step_inputs import Logprobs, StepOutputs
from worker.logprobs import frames, logprobs_message
from worker.prompt_scoring import ScoredPrompt
from worker.result_columns import put_columns
from worker.sampling_state import NO_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """int64 all."""

    epoch: int
    step: int
    rows_N: np.ndarray
    sequences_N: np.ndarray
    # Of the first token that each samples, in its output.
    positions_N: np.ndarray
    # None: the plan names no drafts.
    num_drafts_N: np.ndarray | None
    # NO_LOGPROBS: the row wants none.
    num_logprobs_N: np.ndarray
    prompts: Sequence[ScoredPrompt]
    # Not named by this step, nor by later ones.
    freed_sequences: Sequence[int]

    def result(self, outputs: StepOutputs, failed_N: np.ndarray) -> step_pb2.StepResult:
        """failed_N: bool, rows whose logits were not finite, in this step or before."""
        result = step_pb2.StepResult(epoch=self.epoch, step=self.step)
        counts_N = None if self.num_drafts_N is None else outputs.counts_N
        put_columns(result, self.sequences_N, self.positions_N, outputs.tokens_ND1, counts_N, failed_N)
        if outputs.logprobs is not None:
            result.logprobs.extend(self._logprobs(outputs, outputs.logprobs, failed_N))
        if outputs.prompt_logprobs is not None:
            result.prompt_logprobs.extend(self._prompt_logprobs(outputs.prompt_logprobs))
        result.timing.forward = outputs.seconds
        return result

    def _logprobs(
        self, outputs: StepOutputs, logprobs: Logprobs, failed_N: np.ndarray
    ) -> Iterator[inference_pb2.TokenLogprobs]:
        """Of what was said, where a draft that was not accepted has an entry, too."""
        entries = {position: entry for entry, position in enumerate(logprobs.positions.tolist())}
        num_scored_N = np.ones_like(self.rows_N) if self.num_drafts_N is None else self.num_drafts_N + 1
        first_N = num_scored_N.cumsum() - num_scored_N
        for i in np.flatnonzero((self.num_logprobs_N != NO_LOGPROBS) & ~failed_N).tolist():
            for turn, token_id in enumerate(outputs.tokens_ND1[i, : outputs.counts_N[i]].tolist()):
                entry = entries[int(first_N[i]) + turn]
                yield _entry(logprobs, entry, token_id, int(self.num_logprobs_N[i]))

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


def _entry(logprobs: Logprobs, entry: int, token_id: int, num_top: int) -> inference_pb2.TokenLogprobs:
    """num_top: as many as this row asked for; another one may have asked for more."""
    return logprobs_message(
        token_id,
        float(logprobs.chosen[entry]),
        int(logprobs.ranks[entry]),
        logprobs.top_ids_K[entry, :num_top].tolist(),
        logprobs.top_K[entry, :num_top].tolist(),
    )
