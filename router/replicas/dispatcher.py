"""Places streams on replicas, and moves them when a replica is lost or refuses."""

import logging
import time

from protos import scheduler_pb2 as wire
from router.accepted import fingerprint_of
from router.errors import (
    DuplicateRequest,
    InvalidRequest,
    MissingFeature,
    NoReplica,
    QueueFull,
    RequestError,
    Superseded,
    Unavailable,
)
from router.replicas.parked import ParkedStreams
from router.replicas.placed_stream import PlacedStream
from router.replicas.replica_set import ReplicaSet
from router.replicas.session import Session
from router.telemetry.metrics import RouterMetrics
from runtime.wire import RESUBMISSION_BITS, SESSION_PART_TOKENS

log = logging.getLogger("octavo.router.dispatcher")

# Losses in a row without a new token that a request survives; after more, the request is the suspect.
_MOST_LOSSES = 16
_MOST_RESUBMISSIONS = (1 << RESUBMISSION_BITS) - 1


class Placement:
    """Where a stream is computed: owns its group (session.GroupOwner) in one Session after the other."""

    def __init__(self, stream: PlacedStream, dispatcher: "Dispatcher") -> None:
        self.stream = stream
        # None: no replica has the stream.
        self.session: Session | None = None
        # The last replica that had the stream: Welcome.replica_id.
        self.replica = ""
        # The one in Started.
        self.fingerprint = ""
        # How often the stream was lost or moved.
        self.num_resubmissions = 0
        # Sessions that refused it since it was placed or lost.
        self.refused_by: list[Session] = []
        # True while the stream is parked.
        self.is_parked = False
        # True once an event has told that it waits; it tries again and again meanwhile.
        self.is_wait_told = False
        # The Session whose replica has computed all that the stream has asked for so far, if more is to come (`rest`).
        self.rested_on: Session | None = None
        self._dispatcher = dispatcher
        self._group = 0
        # Losses in a row without a token in between, and the output tokens at the last one.
        self._num_losses = self._num_tokens_when_lost = 0

    @property
    def is_placed(self) -> bool:
        return self.session is not None

    @property
    def can_leave(self) -> bool:
        """True if another replica can continue the stream, whose tokens so far must fit into one message."""
        return (
            self.session is not None
            and not self.stream.done
            and not self.stream.complete
            and self.stream.num_output_tokens <= SESSION_PART_TOKENS
            and self.num_resubmissions < _MOST_RESUBMISSIONS
        )

    def submit_to(self, session: Session) -> None:
        """Hands the unfinished choices to a replica, with their tokens so far."""
        if self.fingerprint != fingerprint_of(session.welcome.model, self.stream.request.features):
            self.stream.note_inexact()
        submit = self._submission(session.welcome.replica_id)
        try:
            request = self.stream.request
            self._group = session.submit(
                submit, request.prompt_token_ids, sink=self.stream, owner=self, items=request.item_files
            )
        except RequestError as error:
            self.stream.fail(error)
            return
        self.session, self.replica = session, session.welcome.replica_id
        self.is_wait_told = False

    def migrate_to(self, session: Session, cause: str) -> None:
        """Moves the stream to another replica; drops what the old one still sends. Only if `can_leave`."""
        assert self.can_leave
        self.stream.request.trace.left(f"moved: {cause}")
        self.leave(wire.CANCEL_REASON_MOVED)
        self.num_resubmissions += 1
        self.submit_to(session)

    def cancel_choice(self, index: int) -> None:
        """Cancels a choice that a stop string has ended."""
        if self.session is not None:
            self.session.cancel(self._group, [index], wire.CANCEL_REASON_STOP)

    def rest(self) -> None:
        """Notes that the group has ended, but not the stream, which asks for more later (`ask_more`)."""
        self.stream.request.trace.left()
        self.rested_on, self.session = self.session, None

    def ask_more(self) -> None:
        """Submits the stream again after a rest."""
        self._dispatcher.ask_more(self)

    def give_up(self, cause: str) -> None:
        """Moves the stream to another replica: its own has cancelled it unasked."""
        self.leave(wire.CANCEL_REASON_CLIENT)
        self._dispatcher.move(self, cause)

    def leave(self, reason: wire.CancelReason) -> None:
        """Gives up the group, and cancels what the replica still computes of it."""
        self.stream.request.trace.left()
        session, self.session = self.session, None
        if session is None:
            self._dispatcher.forget(self)
            return
        if not self.stream.complete:
            session.cancel(self._group, [], reason)
        # A stream that goes on elsewhere still counts what was done for it here.
        session.leave(self._group, None if self.stream.done else self.stream.note_drafts)

    def note_loss(self) -> int:
        """Counts the loss of its replica. Returns the losses in a row without a new token."""
        num_tokens = self.stream.num_output_tokens
        if num_tokens > self._num_tokens_when_lost:
            self._num_losses = 0
        self._num_tokens_when_lost = num_tokens
        self._num_losses += 1
        self.num_resubmissions += 1
        return self._num_losses

    # --- from the replica (session.GroupOwner)

    def on_rejected(self, rejected: wire.Rejected) -> None:
        session, self.session = self.session, None
        stream = self.stream
        stream.request.trace.left(f"refused: {rejected.message}")
        if stream.done:
            return
        if rejected.reason in (wire.REJECT_REASON_QUEUE_FULL, wire.REJECT_REASON_DRAINING):
            if session is not None:
                self.refused_by.append(session)
            self._dispatcher.retry(self, rejected)
        elif rejected.reason == wire.REJECT_REASON_DUPLICATE:
            stream.fail(DuplicateRequest(rejected.message))
        elif rejected.reason == wire.REJECT_REASON_SUPERSEDED:
            stream.fail(Superseded(rejected.message))
        else:
            stream.fail(InvalidRequest(rejected.message))

    def on_lost(self, cause: str) -> None:
        self.session = None
        stream = self.stream
        stream.request.trace.left(cause)
        if stream.done:
            return
        if stream.complete:
            stream.finish()
        else:
            self._dispatcher.move(self, cause)

    def _submission(self, replica_id: str) -> wire.Submit:
        """Builds the Submit for a replica. replica_id: Welcome.replica_id."""
        request = self.stream.request
        submit = wire.Submit(
            request_id=request.scoped_id,
            attempt=(request.attempt << RESUBMISSION_BITS) + self.num_resubmissions,
            sampling=self.stream.sampling_to_submit,
            choices=self.stream.starts(),
            priority=request.priority,
            tenant=request.tenant,
            weight=request.weight,
            cache_salt=request.cache_salt,
            traceparent=request.trace.submitted(replica_id, self.num_resubmissions),
            items=request.items,
        )
        if request.deadline is not None:
            # 0 would mean no deadline.
            submit.timeout = max(request.deadline - time.monotonic(), 0.001)
        return submit


class Dispatcher:
    """Decides where streams are computed."""

    def __init__(self, replicas: ReplicaSet, metrics: RouterMetrics) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._parked = ParkedStreams(metrics.parked_streams, replicas.describe)
        replicas.subscribe(self._on_change)

    def open(self, stream: PlacedStream) -> Placement:
        """Returns the placement of a new stream; `place` begins it."""
        return Placement(stream, self)

    def place(self, placement: Placement) -> None:
        """Begins a new stream. Raises NoReplica."""
        stream = placement.stream
        resume = stream.request.resume
        placement.fingerprint = "" if resume is None else resume.fingerprint
        if stream.complete:
            stream.begin(placement.fingerprint, exact=True)
            return
        session = self._replicas.choose(stream.request.routing_hints, placement.fingerprint)
        placement.fingerprint = fingerprint_of(session.welcome.model, stream.request.features)
        stream.begin(placement.fingerprint, exact=resume is None or resume.fingerprint == placement.fingerprint)
        placement.submit_to(session)

    def move(self, placement: Placement, cause: str) -> None:
        """Moves a stream whose replica is lost to another one, or to the same one once it is back."""
        num_losses = placement.note_loss()
        if num_losses > _MOST_LOSSES:
            placement.stream.fail(
                Unavailable(
                    f"{num_losses} replicas in a row lost this request before its next token, the last: {cause}. "
                    "Resume later"
                )
            )
        elif placement.num_resubmissions > _MOST_RESUBMISSIONS:
            placement.stream.fail(
                Unavailable(f"this request was moved {_MOST_RESUBMISSIONS} times, the maximum: resume it")
            )
        else:
            self._go_on(placement)

    def retry(self, placement: Placement, rejected: wire.Rejected) -> None:
        """Tries one other replica if a queue was full, every other one if a replica drains.

        If none takes it, a new stream is refused; one that had begun is parked, so that its tokens are not lost.
        """
        hints = placement.stream.request.routing_hints
        draining = rejected.reason == wire.REJECT_REASON_DRAINING
        if draining or len(placement.refused_by) <= 1:
            try:
                session = self._replicas.choose(hints, placement.fingerprint, exclude=placement.refused_by)
            except (NoReplica, MissingFeature):
                pass
            else:
                placement.submit_to(session)
                return
        if placement.num_resubmissions or placement.rested_on is not None:
            self._park(placement)
        else:
            placement.stream.fail(Unavailable(rejected.message) if draining else QueueFull(rejected.message))

    def ask_more(self, placement: Placement) -> None:
        """Submits a stream that has rested: where it was, because its blocks are cached there, or else elsewhere."""
        placement.refused_by.clear()
        here = placement.rested_on
        if any(each.session is here and each.ready and not each.too_slow for each in self._replicas.replicas):
            assert here is not None
            placement.submit_to(here)
            return
        try:
            session = self._replicas.choose(placement.stream.request.routing_hints, placement.fingerprint)
        except NoReplica:
            self._park(placement)
        else:
            placement.submit_to(session)

    def forget(self, placement: Placement) -> None:
        """Drops a stream that has ended without a replica."""
        if placement.is_parked:
            placement.is_parked = False
            self._parked.forget(placement.stream)

    def end_parked(self, error: RequestError) -> None:
        """Ends the parked streams: this router stops, and parks no more."""
        self._parked.end(error)

    def placements_on(self, session: Session) -> list[Placement]:
        """Returns the placements of the streams on a Session."""
        return [owner for owner in session.owners if isinstance(owner, Placement)]

    def _go_on(self, placement: Placement) -> None:
        placement.is_parked = False
        placement.refused_by.clear()
        stream = placement.stream
        try:
            session = self._replicas.choose(stream.request.routing_hints, placement.fingerprint)
        except (NoReplica, MissingFeature):
            self._park(placement)
            return
        self._metrics.resubmissions.inc()
        self._note(placement, "moved", f"continues at replica {session.welcome.replica_id}", stream.num_output_tokens)
        log.info(
            "continues on another replica after %d output tokens",
            stream.num_output_tokens,
            extra=stream.request.log_fields,
        )
        placement.submit_to(session)

    def _note(self, placement: Placement, kind: str, what: str, num_tokens: int) -> None:
        request = placement.stream.request
        self._metrics.events.note(
            kind,
            f"{what}, after {num_tokens} output tokens",
            replica=placement.replica,
            request_id=request.request_id,
            tenant=request.tenant,
        )

    def _park(self, placement: Placement) -> None:
        placement.is_parked = True
        if not placement.is_wait_told:
            placement.is_wait_told = True
            self._note(placement, "parked", "waits for a replica", placement.stream.num_output_tokens)
        self._parked.park(placement.stream, lambda: self._go_on(placement))

    def _on_change(self, replicas: ReplicaSet) -> None:
        if replicas.num_usable:
            self._parked.release()
