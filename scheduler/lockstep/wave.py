"""When replicas that compute their steps together do so, and when they rest.

A wave is a run of steps. It begins where the coordinator says, and ends without a word: whoever has seen
max_steps_in_flight steps of it in a row in which there was nothing to compute anywhere ends it so many steps later. All
replicas see the same token counts, and all have those of step s - max_steps_in_flight before they can send step s; so
all end it before the same step.

So many in a row, rather than one: a sequence that is in one step at a time leaves those between empty.
"""


class WaveError(RuntimeError):
    """Replicas disagree about which steps belong to a wave: one of them has not kept to the rule."""


class Waves:
    """Of one replica, in one epoch. Steps are numbered from 1."""

    def __init__(self, max_steps_in_flight: int) -> None:
        """max_steps_in_flight: the same in all replicas."""
        self._max_steps_in_flight = max_steps_in_flight
        # The latest wave's first step, and the first one after it; None: its end is not known yet.
        self._first = 0
        self._end: int | None = 1
        # Where the next one begins, if others have come to the end of this one before.
        self._next = 0
        self._num_empty = 0
        self.num_begun = 0

    def holds(self, step: int) -> bool:
        """Whether the next step to be sent belongs to a wave: then it has to be sent, empty if need be."""
        return self._first <= step and (self._end is None or step < self._end)

    def announce(self, first_step: int) -> None:
        """The coordinator says where the latest wave begins, and may say so again; 0: there was none. Raises
        WaveError."""
        if first_step <= self._first:
            return
        self._next = first_step
        if self._end is not None:
            self._begin_next(self._end)

    def note_result(self, step: int, num_tokens: int) -> None:
        """A step has returned; they do so in order. num_tokens: of all replicas. Raises WaveError."""
        if self._end is not None or step < self._first:
            return
        self._num_empty = 0 if num_tokens else self._num_empty + 1
        if self._num_empty == self._max_steps_in_flight:
            self._end = step + self._max_steps_in_flight
            if self._next:
                self._begin_next(self._end)

    def _begin_next(self, end: int) -> None:
        if self._next != end:
            raise WaveError(f"a wave is to begin at step {self._next}, but the one before ends before step {end}")
        self._first, self._end, self._next = end, None, 0
        self._num_empty = 0
        self.num_begun += 1
