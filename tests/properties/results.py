"""The outcome that a result must have, and malformed results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scheduler.core.messages import FinishReason, Result, SequenceKey, StepOutputs
from tests.fakes.model import logprobs_of
from tests.properties.model import Flight, ModelSequence

if TYPE_CHECKING:
    from tests.properties.world import World

# A sequence number that no core ever assigns.
NOBODY = 2**40


def expect(
    world: World, flight: Flight, result: Result
) -> tuple[dict[SequenceKey, list[int]], list[tuple[ModelSequence, FinishReason]]]:
    """The outcome that a result must have: tokens by sequence, and ends."""
    _note_waits(world, result)
    tokens: dict[SequenceKey, list[int]] = {}
    ends: list[tuple[ModelSequence, FinishReason]] = []
    counts = [1] * len(result.sequences) if result.num_tokens is None else result.num_tokens.tolist()
    start, over = 0, set[int]()
    for number, position, count in zip(result.sequences.tolist(), result.positions.tolist(), counts, strict=True):
        sampled = result.token_ids[start : start + count].tolist()
        start += count
        sequence = world.by_generation.get(number)
        if sequence is None or position != len(sequence.tokens) or sequence.key in tokens:
            world.seen["a result for one that has gone"] += number < NOBODY
            continue
        missing = len(sequence.expected.token_ids) - len(sequence.tokens)
        tokens[sequence.key] = sampled[:missing]
        world.seen["failed within its drafts"] += number in result.failed
        if count >= missing:
            over.add(number)
            ends.append((sequence, sequence.expected.reason))
            world.seen[f"ended: {sequence.expected.reason.value}"] += 1
            world.seen["ended by its own stop token"] += sequence.expected.stop_token_id is not None
            world.seen["ended within its drafts"] += count > missing
    failed = {number for number in result.failed - over if number in world.by_generation}
    ends += [(world.by_generation[number], FinishReason.ERROR) for number in sorted(failed)]
    world.seen["failed"] += len(failed)
    for row in world.worker.rows.values():
        if row.sequence in failed:
            world.spoiled.update(row.block_ids)
    for number in set(flight.result.sequences.tolist()) - set(result.sequences.tolist()) - failed:
        if number in world.by_generation:
            ends.append((world.by_generation[number], FinishReason.ERROR))
            world.seen["forgotten by the workers"] += 1
    return tokens, ends


def take_outputs(world: World, outputs: StepOutputs, expected: dict[SequenceKey, list[int]]) -> None:
    """Checks the outputs of a step, and gives sequences their tokens."""
    keys = list(zip(outputs.groups.tolist(), outputs.choices.tolist(), strict=True))
    counts = [1] * len(keys) if outputs.num_tokens is None else outputs.num_tokens.tolist()
    assert len(set(keys)) == len(keys) == len(outputs.first_tokens)
    assert sum(counts) == len(outputs.token_ids)
    assert set(keys) == expected.keys(), "tokens of other sequences than those that sampled"
    start = 0
    for index, (key, count) in enumerate(zip(keys, counts, strict=True)):
        sequence = world.live[key]
        token_ids = outputs.token_ids[start : start + count].tolist()
        start += count
        assert outputs.first_tokens[index] == len(sequence.tokens), "a gap"
        assert token_ids == expected[key]
        sequence.tokens += token_ids
        assert sequence.tokens == sequence.expected.token_ids[: len(sequence.tokens)], "not its output when alone"
        if sequence.request.sampling.has_logprobs:  # type: ignore[attr-defined]
            assert outputs.logprobs[index] == [logprobs_of(token_id) for token_id in token_ids]
        else:
            assert index not in outputs.logprobs
    world.num_output_tokens += len(outputs.token_ids)


def _note_waits(world: World, result: Result) -> None:
    """Notes the sequences that wait for a later step in flight, because this result says that tokens are forced."""
    for generation, drafts in result.drafts.items():
        sequence = world.by_generation.get(generation)
        if sequence is not None and sequence.request.is_constrained and len(drafts) >= 3:
            sequence.waits = any(sequence.row in later.rows for later in world.in_flight)


def without(result: Result, index: int) -> Result:
    """The result as if the workers had forgotten one of its sequences."""
    counts = np.ones(len(result.sequences), np.int32) if result.num_tokens is None else result.num_tokens
    start = int(counts[:index].sum())
    kept = np.delete(counts, index)
    return Result(
        step=result.step,
        sequences=np.delete(result.sequences, index),
        positions=np.delete(result.positions, index),
        num_tokens=None if result.num_tokens is None else kept,
        token_ids=np.delete(result.token_ids, slice(start, start + int(counts[index]))),
        logprobs=result.logprobs,
        drafts=result.drafts,
        failed=result.failed,
    )


def with_strays(result: Result) -> Result:
    """The result with extra entries at both ends: sequences that do not exist, at position 0 and at position 7."""
    sequences = [NOBODY, *result.sequences.tolist(), NOBODY + 1]
    positions = [0, *result.positions.tolist(), 7]
    counts = [1] * len(result.sequences) if result.num_tokens is None else result.num_tokens.tolist()
    return Result(
        step=result.step,
        sequences=np.array(sequences, np.int64),
        positions=np.array(positions, np.int32),
        num_tokens=None if result.num_tokens is None else np.array([1, *counts, 1], np.int32),
        token_ids=np.array([1, *result.token_ids.tolist(), 1], np.int32),
        logprobs=result.logprobs,
        drafts=result.drafts,
        failed=result.failed | {NOBODY + 2},
    )
