"""Places streams on replicas, moves them when a replica is lost or refuses, and parks those that none takes now."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import Gauge

from protos import scheduler_pb2 as wire
from router.accepted import fingerprint_of
from router.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    MissingFeature,
    NoReplica,
    QueueFull,
    RequestError,
    Superseded,
    Unavailable,
)
from router.replicas.replica_set import ReplicaSet
from router.replicas.session import Session
from router.streams.states import Lifecycle, StreamState
from router.telemetry.metrics import RouterMetrics
from router.turns import run_in_slices
from runtime.wire import RESUBMISSION_BITS, SESSION_PART_TOKENS

if TYPE_CHECKING:
    # A stream has a placement, and is built above it.
    from router.streams.stream import Stream

log = logging.getLogger("octavo.router.streams")

# Losses in a row without a new token that a request survives; after more, the request is the suspect.
_MOST_LOSSES = 16
_MOST_RESUBMISSIONS = (1 << RESUBMISSION_BITS) - 1
# Streams refused by full queues try again in batches, at intervals: each brings all its tokens with it.
_TRIES, _TRY_AGAIN_S = 32, 0.25
# An outage is logged once, and not again for this long if streams come and go.
_QUIET_S = 10.0


class Placement(Lifecycle):
    """Where a stream is computed: has its group in one Session after the other."""

    def __init__(self, stream: "Stream", dispatcher: "Dispatcher") -> None:
        super().__init__(StreamState.WAITING)
        self.stream = stream
        # The one whose replica has the stream; None in other states than PLACED.
        self.session: Session | None = None
        # The last replica that had the stream: Welcome.replica_id.
        self.replica = ""
        # The one in Started.
        self.fingerprint = ""
        # How often the stream was lost or moved.
        self.num_resubmissions = 0
        # Sessions that refused it since it was placed or lost.
        self.refused_by: list[Session] = []
        # The Session whose replica computed all that the stream had asked for when it rested last: its blocks are
        # cached there.
        self.rested_on: Session | None = None
        self._dispatcher = dispatcher
        self._group = 0
        # Losses in a row without a token in between, and the output tokens at the last one.
        self._num_losses = self._num_tokens_when_lost = 0

    @property
    def log_fields(self) -> dict[str, str]:
        return self.stream.request.log_fields

    def end_by(self, error: Internal) -> None:
        self.stream.fail(error)

    @property
    def can_leave(self) -> bool:
        """True if another replica can continue the stream, whose tokens so far must fit into one message."""
        return (
            self.state is StreamState.PLACED
            and not self.stream.complete
            and self.stream.num_output_tokens <= SESSION_PART_TOKENS
            and self.num_resubmissions < _MOST_RESUBMISSIONS
        )

    def submit_to(self, session: Session) -> None:
        """Hands the unfinished choices to a replica, with their tokens so far."""
        if not self.become(StreamState.PLACED):
            return
        request = self.stream.request
        if self.fingerprint != fingerprint_of(session.welcome.model, request.features):
            self.stream.note_inexact()
        submit = self._submission(session.welcome.replica_id)
        try:
            self._group = session.submit(submit, request.prompt_token_ids, owner=self, items=request.item_files)
        except RequestError as error:
            self.stream.fail(error)
            return
        self.session, self.replica = session, session.welcome.replica_id

    def migrate_to(self, session: Session, cause: str) -> None:
        """Moves the stream to another replica; drops what the old one still sends. Only if `can_leave`."""
        assert self.can_leave
        self.stream.request.trace.left(f"moved: {cause}")
        if self._leave(wire.CANCEL_REASON_MOVED):
            self.num_resubmissions += 1
            self.submit_to(session)

    def cancel_choice(self, index: int) -> None:
        """Cancels a choice that a stop string has ended."""
        if self.session is not None:
            self.session.cancel(self._group, [index], wire.CANCEL_REASON_STOP)

    def rest(self) -> None:
        """Notes that the group has ended, but not the stream, which asks for more later (`ask_more`)."""
        if not self.become(StreamState.RESTING):
            return
        self.stream.request.trace.left()
        session, self.session = self.session, None
        if session is not None:
            session.leave(self._group)
        self.rested_on = session

    def ask_more(self) -> None:
        """Submits the stream again after a rest."""
        self._dispatcher.ask_more(self)

    def give_up(self, cause: str) -> None:
        """Moves the stream to another replica: its own has cancelled it unasked."""
        if self._leave(wire.CANCEL_REASON_CLIENT):
            self._dispatcher.move(self, cause)

    def end(self, reason: wire.CancelReason) -> None:
        """Notes that nothing more is computed for the stream. reason: for the replica that has it, if one has. Later
        calls change nothing."""
        if self.state is StreamState.ENDED:
            return
        if self.state is StreamState.PARKED:
            self._dispatcher.forget(self)
        self.become(StreamState.ENDED)
        self._give_up_group(reason, None)

    def _leave(self, reason: wire.CancelReason) -> bool:
        """Takes the stream from its replica. One that goes on elsewhere still counts what was done for it here."""
        if not self.become(StreamState.WAITING):
            return False
        self._give_up_group(reason, self.stream.note_drafts)
        return True

    def _give_up_group(
        self, reason: wire.CancelReason, on_finish: Callable[[wire.SequenceFinish], None] | None
    ) -> None:
        """Leaves the group, if it has one, and cancels what the replica still computes of it. on_finish: as in
        Session.leave."""
        self.stream.request.trace.left()
        session, self.session = self.session, None
        if session is None:
            return
        if not self.stream.complete:
            session.cancel(self._group, [], reason)
        session.leave(self._group, on_finish)

    def note_loss(self) -> int:
        """Counts the loss of its replica. Returns the losses in a row without a new token."""
        num_tokens = self.stream.num_output_tokens
        if num_tokens > self._num_tokens_when_lost:
            self._num_losses = 0
        self._num_tokens_when_lost = num_tokens
        self._num_losses += 1
        self.num_resubmissions += 1
        return self._num_losses

    # --- from the Session that has its group

    def on_rejected(self, rejected: wire.Rejected) -> None:
        """Takes that its group is refused."""
        session, self.session = self.session, None
        stream = self.stream
        stream.request.trace.left(f"refused: {rejected.message}")
        if not self.become(StreamState.WAITING):
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
        """Takes that the Session has ended; the group is cancelled with it."""
        self.session = None
        stream = self.stream
        stream.request.trace.left(cause)
        if not self.become(StreamState.WAITING):
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


class _Parked(NamedTuple):
    go_on: Callable[[], None]
    # Fires at the deadline, if the stream has one.
    timer: asyncio.TimerHandle | None


class ParkedStreams:
    """Parked streams, in order of arrival. They stay live: they count, and can be cancelled."""

    def __init__(self, gauge: Gauge, describe: Callable[[], str]) -> None:
        """gauge: shows their number. describe: returns the state of the replicas, for the log."""
        self._gauge = gauge
        self._describe = describe
        self._parked: dict[Stream, _Parked] = {}
        self._next_try: asyncio.TimerHandle | None = None
        self._ending: RequestError | None = None
        self._told_at = -_QUIET_S

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, stream: "Stream", go_on: Callable[[], None]) -> None:
        """Parks a stream. go_on: submits it, or parks it again."""
        if self._ending is not None:
            stream.fail(self._ending)
            return
        now = time.monotonic()
        if not self._parked and now - self._told_at >= _QUIET_S:
            log.warning("no replica takes streams that have begun: they are held until one does: %s", self._describe())
            self._told_at = now
        deadline = stream.request.deadline
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - now, _expire, stream)
        self._parked[stream] = _Parked(go_on, timer)
        self._changed()

    def forget(self, stream: "Stream") -> None:
        """Drops a stream that has ended."""
        if stream in self._parked:
            self._unpark(stream)
            self._changed()

    def release(self) -> None:
        """Submits all streams, or parks them again: a replica can take requests."""
        self._try(len(self._parked))

    def end(self, error: RequestError) -> None:
        """Ends all parked streams, and from now on every stream that would be parked."""
        self._ending = error
        for stream in list(self._parked):
            stream.fail(error)

    def _try(self, count: int) -> None:
        run_in_slices(self._go_on(list(self._parked)[:count]))

    def _go_on(self, streams: Sequence["Stream"]) -> Iterator[None]:
        for stream in streams:
            # It may have ended since the last slice.
            if stream in self._parked:
                self._unpark(stream).go_on()
            yield
        self._changed()

    def _try_some(self) -> None:
        self._next_try = None
        self._try(_TRIES)

    def _unpark(self, stream: "Stream") -> _Parked:
        parked = self._parked.pop(stream)
        if parked.timer is not None:
            parked.timer.cancel()
        return parked

    def _changed(self) -> None:
        self._gauge.set(len(self._parked))
        if self._parked and self._next_try is None:
            # Spread out, so that routers whose streams were refused together do not come back together.
            delay = _TRY_AGAIN_S * random.uniform(0.5, 1.5)
            self._next_try = asyncio.get_running_loop().call_later(delay, self._try_some)
        elif not self._parked and self._next_try is not None:
            self._next_try.cancel()
            self._next_try = None


def _expire(stream: "Stream") -> None:
    stream.fail(DeadlineExceeded("the deadline passed while no replica could continue"), wire.CANCEL_REASON_DEADLINE)


class Dispatcher:
    """Decides where streams are computed."""

    def __init__(self, replicas: ReplicaSet, metrics: RouterMetrics) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._parked = ParkedStreams(metrics.parked_streams, replicas.describe)
        replicas.subscribe(self._on_change)

    def open(self, stream: "Stream") -> Placement:
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
        except (NoReplica, MissingFeature):
            self._park(placement)
        else:
            placement.submit_to(session)

    def forget(self, placement: Placement) -> None:
        """Drops a parked stream, which ends."""
        self._parked.forget(placement.stream)

    def end_parked(self, error: RequestError) -> None:
        """Ends the parked streams: this router stops, and parks no more."""
        self._parked.end(error)

    def placements_on(self, session: Session) -> list[Placement]:
        """Returns the placements of the streams on a Session."""
        return session.owners

    def _go_on(self, placement: Placement) -> None:
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
        """Parks a stream, or leaves it so after another try."""
        if placement.state is not StreamState.PARKED:
            if not placement.become(StreamState.PARKED):
                return
            self._note(placement, "parked", "waits for a replica", placement.stream.num_output_tokens)
        self._parked.park(placement.stream, lambda: self._go_on(placement))

    def _on_change(self, replicas: ReplicaSet) -> None:
        if replicas.num_usable:
            self._parked.release()
