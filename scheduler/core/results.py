"""Applies the results of plans: tokens, ends, and forced tokens for the next step."""

from itertools import zip_longest

import numpy as np

from scheduler.core.messages import Moment, Result, SequenceEnd, StepOutputs
from scheduler.core.speculation import Speculator
from scheduler.core.state.blocks import num_blocks_for
from scheduler.core.state.decodes import Selection
from scheduler.core.state.request import Sequence
from scheduler.core.state.running import StepInFlight
from scheduler.core.state.state import State

# The fewest forced tokens, while another step of the sequence is in flight, for which it waits for that step's result
# and then verifies the rest as drafts: it misses a step, and gets all of them in the next.
_LEAST_WORTH_WAITING = 3
_NO_KEYS, _NO_TOKENS = np.zeros(0, np.int64), np.zeros(0, np.int32)


_NOT_FINITE = "the model's logits were not finite"


def no_outputs() -> StepOutputs:
    return StepOutputs(groups=_NO_KEYS, choices=_NO_TOKENS, first_tokens=_NO_TOKENS, token_ids=_NO_TOKENS)


class Results:
    def __init__(self, state: State, speculator: Speculator | None = None) -> None:
        """speculator: None if no sequence gets drafts but forced tokens."""
        self._state, self._speculator = state, speculator

    def apply(self, awaited: StepInFlight, result: Result, now: float) -> StepOutputs:
        """Applies the result of a step. Ignores tokens of sequences that have ended or were preempted since; the latter
        compute them again.

        A sequence that should have got tokens and did not ends with ERROR: the workers disagree with the core about it.
        """
        state = self._state
        state.rows.step_returned(awaited.step)
        for sequence, generation in awaited.finishing:
            # Skips sequences that were preempted or have ended since.
            if sequence.generation == generation and generation not in result.failed:
                group, choice = sequence.key
                state.timelines.add(group, Moment.DECODING, now, choice=choice, step=awaited.step)
        # Both `_take_columns` and `_take_several` compare the positions.
        is_usual = not awaited.has_forced and not result.failed
        if not is_usual or result.sequences.tobytes() != awaited.generations.tobytes():
            outputs = self._take_one_by_one(awaited, result, now)
        elif awaited.num_drafts is None and result.num_tokens is None:
            outputs = self._take_columns(awaited, result, now)
        else:
            outputs = self._take_several(awaited, result, now)
        state.stats.num_output_tokens += len(outputs.token_ids)
        for generation, drafts in result.drafts.items():
            self._take_drafts(generation, drafts)
        if state.fault_isolation.by_group:
            state.fault_isolation.clear(state.groups, state.running)
        return outputs

    # --- The fast path: columns

    def _take_columns(self, awaited: StepInFlight, result: Result, now: float) -> StepOutputs:
        state, decodes = self._state, self._state.decodes
        token_ids, positions = result.token_ids, result.positions
        logprobs = result.logprobs
        selection: Selection
        if awaited.decodes_version == decodes.version:
            selection = slice(0, len(awaited.generations))
        else:
            here, selection = decodes.locate(awaited.rows, awaited.generations)
            token_ids, positions = token_ids[here], positions[here]
        first_tokens = decodes.output_positions(selection)
        if first_tokens.tobytes() != positions.tobytes():
            return self._take_one_by_one(awaited, result, now)
        full = decodes.append(selection, token_ids)
        groups, choices = decodes.keys(selection)
        outputs = StepOutputs(groups=groups, choices=choices, first_tokens=first_tokens, token_ids=token_ids)
        if logprobs:
            generations = decodes.generations(selection).tolist()
            outputs.logprobs = {
                i: logprobs[generation] for i, generation in enumerate(generations) if generation in logprobs
            }
        if self._speculator is not None:
            indices = np.arange(selection.stop) if isinstance(selection, slice) else selection
            self._speculator.take_tokens(*decodes.rows_of(indices), token_ids, None)
        # Most tokens end nothing: the stop rules are checked only for those that might.
        may_end = state.end_tokens.among(token_ids) | full
        if decodes.num_watched:
            may_end |= decodes.watched(selection)
        ending = may_end.nonzero()[0]
        if len(ending):
            for sequence in decodes.at(ending if isinstance(selection, slice) else selection[ending]):
                self._end_if_it_should(sequence, outputs.ends, now)
        return outputs

    # --- Columns of several tokens

    def _take_several(self, awaited: StepInFlight, result: Result, now: float) -> StepOutputs:
        """Takes a step in which decodes verified drafts."""
        decodes = self._state.decodes
        here, indices = decodes.locate(awaited.rows, awaited.generations)
        given = np.ones(len(here), np.int64) if result.num_tokens is None else result.num_tokens.astype(np.int64)
        num_drafts = np.zeros(len(here), np.int64) if awaited.num_drafts is None else awaited.num_drafts
        first_tokens = decodes.output_positions(indices)
        are_good = len(given) == len(here) and bool(((given >= 1) & (given <= 1 + num_drafts)).all())
        if not are_good or first_tokens.tobytes() != result.positions[here].tobytes() or not len(indices):
            return self._take_one_by_one(awaited, result, now)
        token_ids, counts, num_drafts = result.token_ids, given[here], num_drafts[here]
        if len(counts) < len(here):
            token_ids = token_ids[here.repeat(given)]
        counts, token_ids, ending = self._cut_at_ends(indices, counts, token_ids)
        groups, choices = decodes.keys(indices)
        rows, generations = decodes.rows_of(indices)
        outputs = StepOutputs(
            groups=groups,
            choices=choices,
            first_tokens=first_tokens,
            num_tokens=counts.astype(np.int32),
            token_ids=token_ids,
        )
        if result.logprobs:
            outputs.logprobs = {
                i: result.logprobs[generation][:count]
                for i, (generation, count) in enumerate(zip(generations.tolist(), counts.tolist(), strict=True))
                if generation in result.logprobs
            }
        decodes.append_several(indices, counts, token_ids)
        drafted = num_drafts > 0
        self._take_verified(indices[drafted], counts[drafted])
        if self._speculator is not None and here.all():
            self._speculator.note_verified(awaited, int(counts[drafted].sum() - drafted.sum()))
        ends = [decodes.sequences[index] for index in indices[ending].tolist()]
        if self._speculator is not None:
            self._speculator.take_tokens(rows, generations, token_ids, counts)
        for sequence in ends:
            decodes.settle(sequence)
            self._end_if_it_should(sequence, outputs.ends, now)
        return outputs

    def _cut_at_ends(
        self, indices: np.ndarray, counts: np.ndarray, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Drops tokens behind one that ends its sequence. Returns counts and tokens, and which sequences end."""
        decodes, firsts = self._state.decodes, counts.cumsum() - counts
        may_end = np.logical_or.reduceat(self._state.end_tokens.among(token_ids), firsts)
        may_end |= counts >= decodes.num_missing(indices)
        if decodes.num_watched:
            may_end |= decodes.watched(indices)
        ending, kept = [], counts
        candidates = may_end.nonzero()[0]
        for i, sequence in zip(candidates.tolist(), decodes.at(indices[candidates]), strict=True):
            first, output = int(firsts[i]), sequence.output_token_ids
            before = len(output)
            for token in token_ids[first : first + int(counts[i])].tolist():
                output.append(token)
                if sequence.ending():
                    ending.append(i)
                    break
            kept = counts.copy() if kept is counts else kept
            kept[i] = len(output) - before
            # `Decodes.append_several` adds them.
            del output[before:]
        if kept is not counts:
            offsets = np.arange(len(token_ids)) - firsts.repeat(counts)
            token_ids = token_ids[offsets < kept.repeat(counts)]
        return kept, token_ids, ending

    def _take_verified(self, indices: np.ndarray, counts: np.ndarray) -> None:
        """Accepts drafts of decodes, which have got these numbers of tokens, and frees blocks they no longer need."""
        state, decodes = self._state, self._state.decodes
        if not len(indices):
            return
        decodes.verified(indices, counts - 1)
        self._count_accepted(np.bincount(counts)[2:])
        state.prefix_cache.publish(*decodes.at(decodes.with_full_blocks(indices, counts)))
        for sequence in decodes.at(decodes.with_spare_blocks(indices)):
            self._trim(sequence)

    def _count_accepted(self, times: np.ndarray) -> None:
        """times[i]: how many sequences had i + 1 drafts accepted."""
        stats, before = self._state.stats, self._state.stats.num_accepted_by_position
        accepted = times[::-1].cumsum()[::-1].tolist()
        stats.num_accepted_tokens += sum(accepted)
        stats.num_accepted_by_position = tuple(map(sum, zip_longest(before, accepted, fillvalue=0)))

    # --- The slow path: one by one

    def _take_one_by_one(self, awaited: StepInFlight, result: Result, now: float) -> StepOutputs:
        """Used where forced tokens are verified, or where the result is not what the plan expects."""
        running = self._state.running
        outputs = no_outputs()
        groups, choices, first_tokens, num_tokens, token_ids = [], [], [], [], []
        given = _by_sequence(result)
        rows, generations = [], []
        counts = [0] * len(awaited.generations) if awaited.num_drafts is None else awaited.num_drafts.tolist()
        for generation, position, num_drafts in zip(
            awaited.generations.tolist(), awaited.positions.tolist(), counts, strict=True
        ):
            sequence = running.by_generation.get(generation)
            if sequence is None:
                continue
            first = position - sequence.num_prompt_tokens
            tokens = given.get((generation, first), ())
            has_failed, why = generation in result.failed, result.why_failed.get(generation, "")
            # Drafts may have been accepted before it failed.
            if has_failed and not 1 <= len(tokens) <= num_drafts:
                outputs.ends.append(self._fail(sequence, why, now))
                continue
            if not 1 <= len(tokens) <= 1 + num_drafts:
                number_of_them = "too many tokens" if tokens else "no token"
                message = f"the workers returned {number_of_them} for it"
                outputs.ends.append(self._state.fail(sequence, message, now))
                continue
            kept = self._append(sequence, tokens, num_drafts)
            if generation in result.logprobs:
                outputs.logprobs[len(groups)] = result.logprobs[generation][: len(kept)]
            groups.append(sequence.key[0])
            choices.append(sequence.choice)
            first_tokens.append(first)
            num_tokens.append(len(kept))
            token_ids += kept
            rows.append(sequence.row)
            generations.append(generation)
            if self._end_if_it_should(sequence, outputs.ends, now):
                continue
            if has_failed:
                outputs.ends.append(self._fail(sequence, why, now))
            elif num_drafts:
                self._give_back(sequence)
        outputs.groups = np.array(groups, np.int64)
        outputs.choices = np.array(choices, np.int32)
        outputs.first_tokens = np.array(first_tokens, np.int32)
        outputs.num_tokens = np.array(num_tokens, np.int32)
        outputs.token_ids = np.array(token_ids, np.int32)
        if self._speculator is not None and rows:
            columns = np.array(rows, np.int64), np.array(generations, np.int64)
            self._speculator.take_tokens(*columns, outputs.token_ids, outputs.num_tokens.astype(np.int64))
        return outputs

    def _append(self, sequence: Sequence, tokens: tuple[int, ...], num_drafts: int) -> list[int]:
        """Appends the tokens up to and including the one that ends the sequence; returns them."""
        decodes, kept = self._state.decodes, []
        for token in tokens:
            if sequence.is_decoding:
                decodes.append_one(sequence, token)
                decodes.settle(sequence)
            else:
                sequence.output_token_ids.append(token)
            kept.append(token)
            if sequence.ending():
                break
        if not sequence.is_decoding:
            self._state.stats.num_accepted_tokens += len(kept) - 1
            # The KV of rejected drafts is void.
            sequence.num_computed_tokens = sequence.num_tokens - 1
        elif num_drafts:
            self._count_accepted(np.bincount([len(kept)])[2:])
            decodes.verified(np.array([decodes.index_of(sequence)]), np.array([len(kept) - 1]))
            decodes.settle(sequence)
        return kept

    def _give_back(self, sequence: Sequence) -> None:
        """Frees look-ahead blocks that are no longer needed; the sequence then decodes until it gets drafts again."""
        self._trim(sequence)
        self._state.prefix_cache.publish(sequence)
        if not sequence.is_decoding:
            self._state.running.decode(sequence, num_planned=sequence.num_tokens)

    def _trim(self, sequence: Sequence) -> None:
        """Frees the blocks of a settled sequence beyond its tokens."""
        state = self._state
        needed = num_blocks_for(sequence.num_tokens, state.settings.block_size)
        if len(sequence.block_ids) > needed:
            state.pool.release(sequence.block_ids[needed:])
            del sequence.block_ids[needed:]
            state.trimmed.append((sequence, sequence.generation, needed))
            if sequence.is_decoding:
                state.decodes.grew_one(sequence)

    def _fail(self, sequence: Sequence, why: str, now: float) -> SequenceEnd:
        """why: why no token was left; empty: logits were not finite."""
        return self._state.fail(sequence, why or _NOT_FINITE, now, no_token=bool(why))

    # --- Shared by both paths

    def _end_if_it_should(self, sequence: Sequence, ends: list[SequenceEnd], now: float) -> bool:
        """Retires the sequence if its last token ends it. Its tokens must be settled."""
        ending = sequence.ending()
        if ending is None:
            return False
        reason, stop_token_id = ending
        self._state.retire(sequence, reason, now)
        ends.append(sequence.end(reason, stop_token_id))
        return True

    def _take_drafts(self, generation: int, drafts: tuple[int, ...]) -> None:
        state = self._state
        sequence = state.running.by_generation.get(generation)
        # A sequence whose next step is in flight already has no use for drafts, unless it waits for more of them.
        if sequence is None or not sequence.is_decoding:
            return
        if not state.settings.max_forced_tokens and sequence.group.request.is_constrained:
            return
        decodes = state.decodes
        known = decodes.num_known(sequence)
        is_free = decodes.num_planned(sequence) == known
        if not sequence.group.request.is_constrained:
            if self._speculator is not None and is_free:
                self._speculator.take_drafts(sequence, drafts)
            return
        if not is_free:
            if len(drafts) >= _LEAST_WORTH_WAITING:
                decodes.wait(sequence)
            return
        # The step also samples the token after the last accepted draft.
        most = sequence.num_prompt_tokens + sequence.max_tokens - known - 1
        drafts = drafts[: max(0, min(most, state.settings.max_forced_tokens))]
        if drafts:
            state.running.draft(sequence, drafts)


def _by_sequence(result: Result) -> dict[tuple[int, int], tuple[int, ...]]:
    """Tokens by (row generation, output position of the first token)."""
    counts = [1] * len(result.sequences) if result.num_tokens is None else result.num_tokens.tolist()
    tokens, found, start = result.token_ids.tolist(), {}, 0
    for generation, position, count in zip(result.sequences.tolist(), result.positions.tolist(), counts, strict=True):
        found[generation, position] = tuple(tokens[start : start + count])
        start += count
    return found
