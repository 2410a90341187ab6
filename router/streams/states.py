"""The states of a stream, and which may follow which: it changes its state in `Lifecycle.become`, and nowhere else.

A stream is computed in one of five states (router.streams.placement):

    WAITING ──> PLACED ──> RESTING        a replica refuses it or is lost, or it moves: PLACED ──> WAITING
       │          ^           │           it asks for more: RESTING ──> PLACED
       └──────> PARKED <──────┘           a replica takes it at last: PARKED ──> PLACED
                                          each of them ──> ENDED

At the same time, one that may go on without a reader is read in one of three (router.intake.attach.held_streams):

    ATTACHED <──> DETACHED                another reader comes: ATTACHED ──> ATTACHED
                                          both ──> FORGOTTEN
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum

from router.errors import Internal

log = logging.getLogger("octavo.router.streams")


class StreamState(Enum):
    """A state of a stream; its value is the word for people."""

    # No replica has it: one is chosen at once.
    WAITING = "waiting"
    # A replica has it, until it says no or is lost.
    PLACED = "placed"
    # Its replica has computed all that it asked for, and it will ask for more: a beam search between two steps.
    RESTING = "resting"
    # It has begun, and no replica takes it now.
    PARKED = "parked"
    # Nothing more is computed for it.
    ENDED = "ended"

    # A reader has it, or comes at once.
    ATTACHED = "attached"
    # It goes on without a reader, for its detach_timeout.
    DETACHED = "detached"
    # No reader finds it any more.
    FORGOTTEN = "forgotten"


FOLLOWERS: Mapping[StreamState, frozenset[StreamState]] = {
    StreamState.WAITING: frozenset({StreamState.PLACED, StreamState.PARKED, StreamState.ENDED}),
    StreamState.PLACED: frozenset({StreamState.WAITING, StreamState.RESTING, StreamState.ENDED}),
    StreamState.RESTING: frozenset({StreamState.PLACED, StreamState.PARKED, StreamState.ENDED}),
    StreamState.PARKED: frozenset({StreamState.PLACED, StreamState.ENDED}),
    StreamState.ENDED: frozenset(),
    StreamState.ATTACHED: frozenset({StreamState.ATTACHED, StreamState.DETACHED, StreamState.FORGOTTEN}),
    StreamState.DETACHED: frozenset({StreamState.ATTACHED, StreamState.FORGOTTEN}),
    StreamState.FORGOTTEN: frozenset(),
}


class Lifecycle(ABC):
    """A stream's state, of one of the two kinds."""

    def __init__(self, first: StreamState) -> None:
        # Read it; `become` changes it.
        self.state = first

    def become(self, state: StreamState) -> bool:
        """Changes the state. A change that FOLLOWERS lacks is a fault of this program: it is logged, ends this stream
        and no other, and False is returned, upon which the caller does nothing more."""
        if state in FOLLOWERS[self.state]:
            self.state = state
            return True
        words = f"a stream that is {self.state.value} can't become {state.value}"
        error = Internal(f"{words}, which is a fault of the router: resume")
        log.error("%s", error, extra=self.log_fields, stack_info=True)
        self.end_by(error)
        return False

    @property
    @abstractmethod
    def log_fields(self) -> Mapping[str, str]:
        """The request, for log lines."""

    @abstractmethod
    def end_by(self, error: Internal) -> None:
        """Ends the stream, unless it has ended. Does not raise."""
