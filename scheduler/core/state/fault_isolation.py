"""Finds the request that makes workers fail.

Workers that fail, or die, in a step may do so because of any group in it. The first time all come back as usual. A
group that was there twice in a row, with no step in between that got it further, is computed alone, as are the others
like it, one after the other. One that fails alone, too, ends with ERROR, and the others go on together.

So a request that makes the workers fail whenever it is computed costs three epochs, however many run beside it, and
each further one like it two more; the others are computed again, and lose nothing. The unit is the group, for its
choices share what may be wrong with it: the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.core.state.request import Group, Sequence
from scheduler.core.state.running import InFlight, Running

# Steps that failed in a row before a group is computed alone.
_MOST_SHARED = 2


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """num_failures: epochs in a row that a failure ended while the group was in a step in flight.

    cleared_at: by choice, the tokens that it has once it has got past the steps that failed.
    """

    num_failures: int = 0
    cleared_at: dict[int, int] = field(default_factory=dict)


class FaultIsolation:
    """Groups by number. Empty, and of no cost to a step, unless workers have failed lately."""

    def __init__(self) -> None:
        self.by_group: dict[int, Suspicion] = {}
        # What was in flight when the workers were lost: by group and choice, the tokens that those steps would have
        # led to. Until it is known whether they failed.
        self.lost: dict[int, dict[int, int]] = {}
        # Only one suspect at a time is computed, and nothing else.
        self.is_isolating = False
        # That one; None: it is to be chosen.
        self.alone: int | None = None

    def note_lost(self, running: Running, in_flight: InFlight) -> None:
        """The workers are lost, and with them the steps in flight. `blame` follows if the workers have failed."""
        self.lost = {}
        first_step, sampling = in_flight.first_step, in_flight.generations
        if not first_step:
            return
        for generation, sequence in running.by_generation.items():
            if generation in sampling or (not sequence.is_decoding and sequence.last_step >= first_step):
                num_tokens = running.decodes.num_planned(sequence) if sequence.is_decoding else sequence.num_tokens + 1
                self.lost.setdefault(sequence.group.number, {})[sequence.choice] = num_tokens

    def blame(self, groups: Mapping[int, Group]) -> int | None:
        """The workers have failed in the steps lost last. Returns the group that they were computing alone, if so."""
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
        """A step has returned: groups that have got past the steps that failed are suspected no longer."""
        for number, suspicion in list(self.by_group.items()):
            sequences = groups[number].sequences
            for choice, num_tokens in suspicion.cleared_at.items():
                sequence = sequences.get(choice)
                if sequence is not None and running.num_known(sequence) < num_tokens:
                    break
            else:
                self.forget(number)

    def forget(self, group: int) -> None:
        """It has ended, or has got past the steps that failed."""
        self.by_group.pop(group, None)
        if self.alone == group:
            self.alone = None

    def gate(self, groups: Mapping[int, Group], running: Running, in_flight: InFlight) -> list[Sequence] | None:
        """While isolating: the sequences to set aside before the next step, so that one group is computed alone.

        None: no step may be planned yet, for those of the group before must return first.
        """
        if self.alone is not None:
            return []
        if in_flight.is_computing:
            return None
        # The group that is computed alone finds all the room there is. Those that were cleared before find their KV
        # again, in the prefix cache or in host blocks. The last one just goes on.
        return list(running.from_last()) if self._choose(groups) else []

    def _choose(self, groups: Mapping[int, Group]) -> bool:
        """Decides which group is computed alone next. False: none is left; isolation is over.

        A group that fails whenever it is computed has not got far, and has come late: others ran well before it came.
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
        """Groups that will be computed alone, if isolation is on."""
        return len(self._to_isolate()) if self.is_isolating else 0

    def _to_isolate(self) -> list[int]:
        return [group for group, suspicion in self.by_group.items() if suspicion.num_failures >= _MOST_SHARED]

    def check_integrity(self, groups: Mapping[int, Group]) -> None:
        """Asserts that only live groups are suspected, and at most one of them computed alone."""
        assert self.by_group.keys() <= groups.keys(), "a group that has ended is suspected"
        assert self.alone is None or (self.is_isolating and self.alone in self.by_group)
