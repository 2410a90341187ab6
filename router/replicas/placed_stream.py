"""A stream as its placement sees it; router.streams.stream implements it."""

from collections.abc import Sequence
from typing import Protocol

from protos.scheduler_pb2 import CANCEL_REASON_CLIENT, CancelReason, SequenceStart
from router.errors import RequestError
from router.replicas.session import TokenSink
from router.request import Request


class PlacedStream(TokenSink, Protocol):
    request: Request

    @property
    def done(self) -> bool:
        """Nothing more is computed for it, by success or failure."""
        ...

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens_to_come(self) -> int:
        """At most, of the choice that has most to come."""
        ...

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of them, if it asks for any, have not come yet."""
        ...

    def starts(self) -> Sequence[SequenceStart]:
        """The unfinished choices, with their tokens so far."""
        ...

    def begin(self, fingerprint: str, *, exact: bool) -> None:
        """Sends Started, and what a resume lacks. exact: False if the fingerprint is not the resume's."""
        ...

    def note_inexact(self) -> None:
        """From now on it is computed with another fingerprint."""
        ...

    def finish(self) -> None:
        """Every choice has ended, and nothing more comes from a replica."""
        ...

    def fail(self, error: RequestError, reason: CancelReason = CANCEL_REASON_CLIENT) -> None:
        """Ends it; the replica that has it, if one has, is told the reason."""
        ...
