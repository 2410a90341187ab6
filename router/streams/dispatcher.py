"""Places streams on replicas, and moves them when a replica is lost or refuses."""

import logging

from protos.scheduler_pb2 import REJECT_REASON_DRAINING, Rejected
from router.errors import NoReplica, QueueFull, RequestError, Unavailable
from router.replicas.replica_set import ReplicaSet
from router.streams.choices import MOST_RESUBMISSIONS
from router.streams.parked import ParkedStreams
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger("octavo.router.dispatcher")

# Something is wrong with a request that so many replicas in a row have lost without a token of it.
_MOST_LOSSES = 16


class Dispatcher:
    """The one place that decides where a stream is computed (streams.Mover)."""

    def __init__(self, replicas: ReplicaSet, metrics: RouterMetrics) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._held = ParkedStreams(metrics.held_streams, self._go_on, replicas.describe)
        replicas.subscribe(self._on_change)

    def place(self, stream: Stream) -> None:
        """Begins a new stream. Raises NoReplica."""
        if stream.complete:
            stream.begin(None, exact=True)
            return
        resume = stream.request.resume
        session = self._replicas.choose(stream.request.routing_hints, "" if resume is None else resume.fingerprint)
        exact = resume is None or resume.fingerprint == session.welcome.model.fingerprint
        stream.begin(session, exact=exact)

    def move(self, stream: Stream, cause: str) -> None:
        """Takes a stream that its replica has lost to another one, or to the same one once it is back."""
        num_losses = stream.note_loss()
        if num_losses > _MOST_LOSSES:
            stream.fail(
                Unavailable(
                    f"{num_losses} replicas in a row lost this request without a token of it, the last: {cause}. "
                    "Resume later"
                )
            )
        elif stream.num_resubmissions > MOST_RESUBMISSIONS:
            stream.fail(
                Unavailable(f"this request was moved {MOST_RESUBMISSIONS} times, as often as may be: resume it")
            )
        else:
            self._go_on(stream)

    def retry(self, stream: Stream, rejected: Rejected) -> None:
        """Tries one other replica if a queue was full, every other one if a replica drains.

        A stream that had begun is held if none takes it: what it has got must not be lost. A new one is refused.
        """
        draining = rejected.reason == REJECT_REASON_DRAINING
        if draining or len(stream.refused_by) <= 1:
            try:
                session = self._replicas.choose(stream.request.routing_hints, stream.fingerprint, exclude=stream.refused_by)
            except NoReplica:
                pass
            else:
                stream.submit_to(session)
                return
        if stream.num_resubmissions:
            self._held.hold(stream)
        else:
            stream.fail(Unavailable(rejected.message) if draining else QueueFull(rejected.message))

    def forget(self, stream: Stream) -> None:
        """It has ended without a replica."""
        self._held.forget(stream)

    def end_held(self, error: RequestError) -> None:
        """This router stops: nothing is held any more."""
        self._held.end(error)

    def _go_on(self, stream: Stream) -> None:
        stream.refused_by.clear()
        try:
            session = self._replicas.choose(stream.request.routing_hints, stream.fingerprint)
        except NoReplica:
            self._held.hold(stream)
            return
        self._metrics.resubmissions.inc()
        log.info(
            "goes on on another replica after %d output tokens",
            stream.num_output_tokens,
            extra=stream.request.log_fields,
        )
        stream.submit_to(session)

    def _on_change(self, replicas: ReplicaSet) -> None:
        if replicas.num_usable:
            self._held.release()
