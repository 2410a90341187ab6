"""Finds the request that makes workers fail.

If workers fail or die in a step, any group in that step may be the cause. The first time, all groups come back as
usual. Groups that were in the failed step twice in a row, with no progress in between, are computed alone, one after
the other. A group that fails alone as well ends with ERROR, and the others go on together.

So a request that makes the workers fail whenever it is computed costs three epochs, however many requests run beside
it, and each further request like it costs two more; the others are recomputed and lose nothing. The unit is the group,
because its choices share what may be at fault: the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.core.state.request import Group, Sequence
from scheduler.core.state.running import InFlight, Running

# A group is computed alone after it was in this many failed steps in a row.
_MOST_SHARED = 2


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """The record of failures of one suspected group.

    num_failures: number of epochs in a row that ended by a failure while the group was in a step in flight.
    cleared_at: by choice, its number of tokens once it has got past the failed steps.
    """

    num_failures: int = 0
    cleared_at: dict[int, int] = field(default_factory=dict)


class FaultIsolation:
    """The suspected groups, by number. Empty, and free of cost for a step, unless workers have failed lately."""

    def __init__(self) -> None:
        self.by_group: dict[int, Suspicion] = {}
        # Sequences in flight when the workers were lost: by group and choice, the number of tokens that those steps
        # would have led to. Kept until it is known if the workers failed.
        self.lost: dict[int, dict[int, int]] = {}
        # True while one suspect at a time is computed, and nothing else.
        self.is_isolating = False
        # The suspect computed alone now; None: not chosen yet.
        self.alone: int | None = None

    def note_lost(self, running: Running, in_flight: InFlight) -> None:
        """Records the sequences in the steps lost with the workers. `blame` follows if the workers failed."""
        self.lost = {}
        first_step, sampling = in_flight.first_step, in_flight.generations
        if not first_step:
            return
        for generation, sequence in running.by_generation.items():
            if generation in sampling or (not sequence.is_decoding and sequence.last_step >= first_step):
                num_tokens = running.decodes.num_planned(sequence) if sequence.is_decoding else sequence.num_tokens + 1
                self.lost.setdefault(sequence.group.number, {})[sequence.choice] = num_tokens

    def blame(self, groups: Mapping[int, Group]) -> int | None:
        """Blames the groups in the steps lost last. Returns the group that was computed alone in them, if any."""
        lost, self.lost = {group: choices for group, choices in self.lost.items() if group in groups}, {}
        for group, cleared_at in lost.items():
            suspicion = self.by_group.setdefault(group, Suspicion())
            suspicion.num_failures += 1
            for choice, num_tokens in cleared_at.items():
                suspicion.cleared_at[choice] = max(num_tokens, suspicion.cleared_at.get(choice, 0))
        if self.alone in lost:
            culprit, self.alone = self.alone, None
            self.is_isolating = False
            return culprit
        self.is_isolating = self.is_isolating or bool(self._to_isolate())
        return None

    def clear(self, groups: Mapping[int, Group], running: Running) -> None:
        """Clears the groups that have got past the failed steps. Called whenever a step has returned."""
        for number, suspicion in list(self.by_group.items()):
            sequences = groups[number].sequences
            for choice, num_tokens in suspicion.cleared_at.items():
                sequence = sequences.get(choice)
                if sequence is not None and running.num_known(sequence) < num_tokens:
                    break
            else:
                self.forget(number)

    def forget(self, group: int) -> None:
        """Forgets a group that has ended or has got past the failed steps."""
        self.by_group.pop(group, None)
        if self.alone == group:
            self.alone = None

    def gate(self, groups: Mapping[int, Group], running: Running, in_flight: InFlight) -> list[Sequence] | None:
        """While isolating: the sequences to set aside before the next step, so that one group is computed alone.

        None: no step may be planned yet, because the previous group's steps must return first.
        """
        if self.alone is not None:
            return []
        if in_flight.is_computing:
            return None
        # The group that is computed alone gets all the room there is. The groups set aside find their KV again in the
        # prefix cache or in host blocks. If no suspect is left, all that run just go on.
        return list(running.from_last()) if self._choose(groups) else []

    def _choose(self, groups: Mapping[int, Group]) -> bool:
        """Chooses the group that is computed alone next. False: none is left, and isolation is over.

        Least progressed first, then newest: a group that fails whenever it is computed has few output tokens, and the
        others ran well before it came.
        """
        self.alone = max(
            self._to_isolate(),
            key=lambda number: max(
                (-len(sequence.output_token_ids), sequence.order) for sequence in groups[number].sequences.values()
            ),
            default=None,
        )
        self.is_isolating = self.alone is not None
        return self.is_isolating

    @property
    def num_to_isolate(self) -> int:
        """The number of groups still to be computed alone; 0 if isolation is off."""
        return len(self._to_isolate()) if self.is_isolating else 0

    def _to_isolate(self) -> list[int]:
        return [group for group, suspicion in self.by_group.items() if suspicion.num_failures >= _MOST_SHARED]

    def check_integrity(self, groups: Mapping[int, Group]) -> None:
        """Asserts that only live groups are suspected, and that the group computed alone is one of them."""
        assert self.by_group.keys() <= groups.keys(), "a group that has ended is suspected"
        assert self.alone is None or (self.is_isolating and self.alone in self.by_group)
