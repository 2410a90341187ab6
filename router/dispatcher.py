"""Places streams on replicas, and moves them when a replica is lost or refuses."""

import asyncio
import logging

from protos.scheduler_pb2 import REJECT_REASON_DRAINING, Rejected
from router.errors import NoReplica, QueueFull, RequestError, Unavailable
from router.metrics import RouterMetrics
from router.replicas import ReplicaSet
from router.streams import Stream

log = logging.getLogger("octavo.router.dispatcher")

# A stream whose replica is lost ends UNAVAILABLE within 5 s if no other one is ready; half a second is for saying so.
MOVE_TIMEOUT_S = 4.5
# Something is wrong with a request that so many replicas have lost.
_MAX_RESUBMISSIONS = 16


class Dispatcher:
    """The one place that decides where a stream is computed (streams.Mover)."""

    def __init__(self, replicas: ReplicaSet, metrics: RouterMetrics) -> None:
        self.replicas = replicas
        self._metrics = metrics
        self._moves: set[asyncio.Task[None]] = set()

    def place(self, stream: Stream) -> None:
        """Begins a new stream. Raises NoReplica."""
        if stream.complete:
            stream.begin(None, exact=True)
            return
        resume = stream.request.resume
        session = self.replicas.choose(stream.request.placement, "" if resume is None else resume.fingerprint)
        exact = resume is None or resume.fingerprint == session.welcome.model.fingerprint
        stream.begin(session, exact=exact)

    def move(self, stream: Stream, cause: str) -> None:
        """Takes a stream to another replica, or to the same one once it is back. Fails it if there is none in time."""
        if stream.num_resubmissions >= _MAX_RESUBMISSIONS:
            stream.fail(
                Unavailable(
                    f"{stream.num_resubmissions + 1} replicas lost this request, the last: {cause}. Resume later"
                )
            )
            return
        task = asyncio.create_task(self._move(stream))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    def retry(self, stream: Stream, rejected: Rejected) -> None:
        """Tries one other replica if a queue was full, every other one if a replica drains."""
        draining = rejected.reason == REJECT_REASON_DRAINING
        error = Unavailable(rejected.message) if draining else QueueFull(rejected.message)
        if not draining and len(stream.refused_by) > 1:
            stream.fail(error)
            return
        try:
            session = self.replicas.choose(stream.request.placement, stream.fingerprint, exclude=stream.refused_by)
        except NoReplica:
            stream.fail(error)
            return
        stream.submit_to(session)

    async def _move(self, stream: Stream) -> None:
        try:
            await self.replicas.wait_usable(MOVE_TIMEOUT_S)
            if stream.done:
                return
            session = self.replicas.choose(stream.request.placement, stream.fingerprint)
        except RequestError as error:
            stream.fail(error)
            return
        stream.num_resubmissions += 1
        self._metrics.resubmissions.inc()
        log.warning(
            "goes on on another replica after %d output tokens",
            stream.num_output_tokens,
            extra={"request_id": stream.request.request_id},
        )
        stream.submit_to(session)
