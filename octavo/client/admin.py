"""The operator's client: explains a request, migrates it, and resets prefix caches."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from octavo.client.connection import DEFAULT_TARGET, key_metadata, open_channel
from octavo.client.errors import RequestNotFound, from_rpc_error
from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminStub

HOLD_STATES = {
    "none": pb.HOLD_STATE_NONE,
    "paused": pb.HOLD_STATE_PAUSED,
    "drained": pb.HOLD_STATE_DRAINED,
}
# Longer than a router waits for its replicas.
_DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """An event of a choice; the fields are those of `TimelineEntry` in protos/admin.proto."""

    moment: str
    time: float
    choice: int
    step: int
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """One attempt at a request on one replica. Times are seconds since the first entry; now: the time of the answer."""

    request_id: str
    replica_id: str
    entries: tuple[TimelineEntry, ...]
    # Entries dropped from the middle.
    num_dropped: int
    finished: bool
    now: float
    # Speculation, over the choices that have finished: draft tokens, and those of them that were accepted.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def from_proto(cls, message: pb.RequestTimeline) -> "RequestTimeline":
        return cls(
            request_id=message.request_id,
            replica_id=message.replica_id,
            entries=tuple(
                TimelineEntry(
                    moment=entry.moment,
                    time=entry.time,
                    choice=entry.choice,
                    step=entry.step,
                    num_tokens=entry.num_tokens,
                    reason=entry.reason,
                )
                for entry in message.entries
            ),
            num_dropped=message.num_dropped,
            finished=message.finished,
            now=message.now,
            num_draft_tokens=message.num_draft_tokens,
            num_accepted_tokens=message.num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Timelines of a request, oldest first. unreachable: replicas that did not answer, with addresses and causes."""

    timelines: tuple[RequestTimeline, ...]
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """num_blocks: blocks that were forgotten, over all replicas. unreachable: replicas that were not reached."""

    num_blocks: int
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """moved_from, moved_to: replicas as in scheduler_addresses. num_output_tokens: those the client had by then."""

    moved_from: str
    moved_to: str
    num_output_tokens: int


class Admin:
    """Talks to a router, which asks all of its replicas, or to one scheduler.

    Errors are those of `octavo.client.errors`. timeout: seconds for each call.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float = _DEFAULT_TIMEOUT_S,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = open_channel(target, credentials)
        self._metadata = key_metadata(api_key)
        self._stub = AdminStub(self._channel)
        self._timeout = timeout

    def explain(self, request_id: str) -> Explanation:
        """Returns what happened to a live or recently finished request, at every attempt. Raises RequestNotFound."""
        answer = self._call(self._stub.Explain, pb.ExplainRequest(request_id=request_id))
        return Explanation(
            timelines=tuple(map(RequestTimeline.from_proto, answer.timelines)), unreachable=tuple(answer.unreachable)
        )

    def reset_prefix_cache(self) -> CacheReset:
        """Empties the prefix caches: later requests find no blocks that were computed before."""
        answer = self._call(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())
        return CacheReset(num_blocks=answer.num_blocks, unreachable=tuple(answer.unreachable))

    def migrate(self, request_id: str, replica: str = "") -> Migration:
        """Moves a live request of this router, or of one that it can ask, to another replica; its client sees a pause.

        replica: the target, as in scheduler_addresses; empty: the router chooses. Raises RequestNotFound, and
        InvalidRequest if there is no such replica, or none that can continue exactly.
        """
        answer = self._call(self._stub.Migrate, pb.MigrateRequest(request_id=request_id, replica=replica))
        return Migration(
            moved_from=answer.moved_from, moved_to=answer.moved_to, num_output_tokens=answer.num_output_tokens
        )

    def observe(self) -> pb.ObserveResponse:
        """Returns what the cluster does at this moment, as protos/admin.proto tells; rates are differences of two."""
        return self._call(self._stub.Observe, pb.ObserveRequest())

    def hold(self, replica: str, state: str) -> int:
        """Holds a replica back at this router. Returns how many of the router's streams the replica has.

        replica: as in scheduler_addresses. state: `paused`: no new requests; `drained`: its streams move away, too;
        `none`: as usual. Raises ValueError for another state, InvalidRequest if there is no such replica.
        """
        if state not in HOLD_STATES:
            raise ValueError(f"state={state!r}: it must be one of {', '.join(HOLD_STATES)}")
        request = pb.HoldRequest(replica=replica, state=HOLD_STATES[state])
        return self._call(self._stub.Hold, request).num_streams

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Admin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, not_found=RequestNotFound) from None
