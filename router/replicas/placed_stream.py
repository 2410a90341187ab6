"""A stream as its placement sees it; router.streams.stream implements it."""

from collections.abc import Sequence
from typing import Protocol

from protos.inference_pb2 import SamplingParams
from protos.scheduler_pb2 import CANCEL_REASON_CLIENT, CancelReason, SequenceFinish, SequenceStart
from router.accepted import Request
from router.errors import RequestError
from router.replicas.session import TokenSink


class PlacedStream(TokenSink, Protocol):
    request: Request

    @property
    def done(self) -> bool:
        """True once nothing more is computed for it, after success or failure."""
        ...

    @property
    def complete(self) -> bool:
        """True once every choice has ended."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens_to_come(self) -> int:
        """Upper bound, for the choice with the most tokens to come."""
        ...

    @property
    def sampling_to_submit(self) -> SamplingParams:
        """A new message: how the tokens to come are computed, without stop strings, which only the router knows."""
        ...

    def starts(self) -> Sequence[SequenceStart]:
        """The unfinished choices, with their tokens so far."""
        ...

    def begin(self, fingerprint: str, *, exact: bool) -> None:
        """Sends Started, and what a resuming client lacks. exact: False if the fingerprint is not the resume's."""
        ...

    def note_inexact(self) -> None:
        """Notes that it continues with another fingerprint."""
        ...

    def note_drafts(self, ended: SequenceFinish) -> None:
        """Counts the drafts of a choice that has ended at a replica, which may not be its own any more."""
        ...

    def finish(self) -> None:
        """Ends the stream: every choice has ended, and nothing more comes from a replica."""
        ...

    def fail(self, error: RequestError, reason: CancelReason = CANCEL_REASON_CLIENT) -> None:
        """Ends the stream with an error. reason: for the replica that has it, if one has."""
        ...
