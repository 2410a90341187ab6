"""Writes a step's inputs to the host memory that they are copied from; StepArrays and parts (worker.device.staging).

Shape suffixes: T tokens, L scored positions, N sampling rows, P scored prompt positions, A axes, M embedded tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from worker.device.staging import Part, StepArrays, StepSlot
from worker.gpu.sampler import ScoredPositions, StepSampling
from worker.step.batch import GpuBatch
from worker.step.inputs import PromptScores, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """Additional inputs of a step that does more than decode."""

    # int64 [L], indices into T of the tokens whose logits are wanted.
    tokens_L: Part
    sampled_rows_L: Part
    output_positions_L: Part
    rows_N: Part
    # Both int64 [P].
    scored_tokens_P: Part | None
    scored_targets_P: Part | None
    # int32 [3, T], with padding, and int64 [M]: see StepInputs.
    rope_positions_AT: Part | None
    embedded_places_M: Part | None


def fill_rows(arrays: StepArrays[np.ndarray], inputs: StepInputs, size: int) -> None:
    """Writes a step's batch to the host arrays. size: rows, with padding."""
    num_rows, num_tokens = len(inputs.rows_S), len(inputs.token_ids_T)
    arrays.rows_R[:num_rows] = inputs.rows_S
    arrays.rows_R[num_rows:size] = -1
    arrays.query_starts[: num_rows + 1] = inputs.query_starts
    arrays.query_starts[num_rows + 1 : size + 1] = num_tokens
    arrays.context_lens_R[:num_rows] = inputs.context_lens_S
    arrays.context_lens_R[num_rows:size] = 0
    arrays.token_ids_T[:num_tokens] = inputs.token_ids_T


def fill_shifts(arrays: StepArrays[np.ndarray], inputs: StepInputs, size: int) -> None:
    num_rows = len(inputs.rows_S)
    arrays.rope_shifts_R[:num_rows] = 0 if inputs.rope_shifts_S is None else inputs.rope_shifts_S
    arrays.rope_shifts_R[num_rows:size] = 0


def with_items(batch: GpuBatch, inputs: StepInputs, mixed: MixedStep) -> GpuBatch:
    positions, places = mixed.rope_positions_AT, mixed.embedded_places_M
    return replace(
        batch,
        rope_positions_AT=None if positions is None else positions.tensor,
        embedded_places_M=None if places is None else places.tensor,
        embeddings_ME=inputs.embeddings_ME,
    )


def fill_decodes(arrays: StepArrays[np.ndarray], scored: ScoredPositions, sampling: StepSampling, size: int) -> None:
    num_scored = len(scored.rows_L)
    arrays.sampled_rows_L[:num_scored] = sampling.sampled_rows_L
    arrays.sampled_rows_L[num_scored:size] = -1
    arrays.output_positions_L[:num_scored] = scored.output_positions_L
    arrays.output_positions_L[num_scored:size] = 0


def stage_mixed(
    inputs: StepInputs, scored: ScoredPositions, sampling: StepSampling, slot: StepSlot, num_tokens: int
) -> MixedStep:
    """num_tokens: of the batch, with padding."""
    scores: PromptScores | None = inputs.prompt_scores
    positions_AT, places_M = inputs.rope_positions_AT, inputs.embedded_places_M
    if positions_AT is not None:
        positions_AT = np.pad(positions_AT, ((0, 0), (0, num_tokens - positions_AT.shape[1])))
    return MixedStep(
        tokens_L=slot.add(scored.tokens_L),
        sampled_rows_L=slot.add(sampling.sampled_rows_L),
        output_positions_L=slot.add(scored.output_positions_L),
        rows_N=slot.add(scored.rows_N),
        scored_tokens_P=None if scores is None else slot.add(scores.tokens_P.astype(np.int64)),
        scored_targets_P=None if scores is None else slot.add(scores.targets_P.astype(np.int64)),
        rope_positions_AT=None if positions_AT is None else slot.add(positions_AT),
        embedded_places_M=None if places_M is None else slot.add(places_M),
    )
