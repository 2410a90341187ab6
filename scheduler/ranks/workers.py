"""Talks to the ranks of one replica over ZeroMQ: handles their messages, begins and ends their epochs.

protos/step.proto describes the protocol. All of this runs on the step loop's thread, which learns from events what
happened to its requests.
"""

import logging
import time
from collections.abc import Container, Iterable
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import parse_monitor_message

from protos import inference_pb2, step_pb2
from runtime.awake_time import AwakeTime
from runtime.wire import STEP_MESSAGE_BYTES
from runtime.zmq_frames import Frames
from scheduler.ranks.epochs import (
    EpochBegun,
    EpochEnded,
    Epochs,
    Event,
    Fatal,
    ItemAnswered,
    Rendezvous,
    StepReturned,
)
from scheduler.ranks.heartbeats import Heartbeats
from scheduler.ranks.liveness import Liveness
from scheduler.ranks.membership import Joined, Membership, MembershipError, Rank, Refused, Returned, Terms
from scheduler.ranks.seen import RankSeen, see
from scheduler.sockets import InvalidMessages, bind_zmq, close_monitored

# Messages that may wait for a rank that does not read: more than there ever are (max_steps_in_flight is at most 64, and
# few items are sent at a time), so a full queue means that the rank has a problem.
_SEND_QUEUE = 128
_SHUTDOWN_LINGER_MS = 1000
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class RankSocket:
    """A ROUTER socket that reports peers that are gone or do not read. For one thread."""

    def __init__(self, context: zmq.Context, endpoint: str, curve_dir: Path | None, *, timeout: float) -> None:
        """timeout: seconds of silence after which a tcp connection is closed. Raises AddressError or CurveError."""
        self.socket = bind_zmq(
            context,
            endpoint,
            curve_dir,
            max_message_bytes=STEP_MESSAGE_BYTES,
            queue=_SEND_QUEUE,
            timeout=timeout,
        )
        self._frames = Frames(self.socket)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)

    def receive(self) -> list[bytes] | None:
        """Returns the next message, starting with the peer's identity; None if there is none yet."""
        return self._frames.receive()

    def next_connection_event(self) -> int | None:
        """Returns the next event, such as zmq.EVENT_DISCONNECTED; None if there is none yet."""
        try:
            return parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return None

    def send(self, identity: bytes, message: step_pb2.SchedulerToWorker) -> bool:
        """Sends a message. False if the peer is gone or does not read."""
        return not self.send_frame(identity, message.SerializeToString())

    def send_frame(self, identity: bytes, frame: bytes) -> str:
        """Sends a frame. Returns an empty string, or the reason why the peer can't take it."""
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return str(error.strerror)
            raise
        return ""

    def is_reachable(self, identity: bytes) -> bool:
        """True if a peer with this identity is connected, found by sending it a probe (ROUTER_MANDATORY)."""
        return self.send(identity, step_pb2.SchedulerToWorker(probe=step_pb2.Probe()))

    def shut_down(self, identity: bytes, reason: str, *, permanent: bool) -> None:
        """Tells a rank to end. reason: empty for an orderly end."""
        self.send(identity, step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown(reason=reason, permanent=permanent)))

    def close(self) -> None:
        """Closes the socket; the last messages get up to a second to leave."""
        close_monitored(self.socket, self.monitor, linger=_SHUTDOWN_LINGER_MS)


log = logging.getLogger("octavo.scheduler")

# The most messages that one round of the loop reads, so that a flood delays no step.
_MAX_MESSAGES = 256


class Workers:
    """Collects Hellos until every rank is present, begins epochs, passes plans and results, notices deaths."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        curve_dir: Path | None,
        terms: Terms,
        heartbeats: Heartbeats,
        invalid: InvalidMessages,
        awake: AwakeTime,
        *,
        rendezvous: Rendezvous | None,
        in_lockstep: bool,
        heartbeat_timeout: float,
        step_timeout: float,
    ) -> None:
        """awake: of the step loop. rendezvous: None if the ranks need none, or the coordinator provides it.
        in_lockstep: epochs include the ranks of other replicas, so they begin and end by `begin_epoch` and `end_epoch`,
        and a rank that has not returned may be waiting for another replica's rank. Raises AddressError or
        CurveError."""
        self._socket = RankSocket(context, endpoint, curve_dir, timeout=heartbeat_timeout)
        self._scheduler, self._invalid, self._in_lockstep = heartbeats.instance, invalid, in_lockstep
        # Callers may only read it, or pass over an epoch.
        self.epochs = Epochs(rendezvous)
        self._membership = Membership(terms)
        self._liveness = Liveness(
            self._socket.is_reachable,
            heartbeats,
            self.epochs,
            awake,
            heartbeat_timeout=heartbeat_timeout,
            step_timeout=step_timeout,
        )
        self._events: list[Event] = []

    # --- For the step loop

    @property
    def sockets(self) -> list[zmq.Socket]:
        """Sockets to poll for input."""
        return [self._socket.socket, self._socket.monitor]

    @property
    def epoch(self) -> int:
        return self.epochs.number

    @property
    def is_ready(self) -> bool:
        """True if plans can be sent."""
        return self.epochs.is_ready

    @property
    def model(self) -> inference_pb2.ModelInfo | None:
        """The model of the latest ready epoch; read only."""
        return self._membership.model

    @property
    def store_address(self) -> str:
        """The store address in rank 0's Hello; empty before that."""
        return self._membership.store_address

    def is_complete(self, now: float) -> bool:
        """True if an epoch can begin: all ranks are present and none is in an epoch."""
        return self.epochs.may_begin(now) and self._membership.have_entered

    def describe(self) -> str:
        """Describes the state of the ranks in a few words, for /health."""
        if self.is_ready:
            return f"epoch {self.epoch}"
        membership = self._membership
        if missing := membership.missing:
            return f"waiting for rank {', '.join(map(str, missing))} of {membership.terms.world_size}"
        return "; ".join(rank.describe(self._liveness.beat(rank)) for rank in membership.ranks.values())

    def see(self, now: float) -> list[RankSeen]:
        """Returns each rank's state, for people who watch it."""
        return [see(rank, self._liveness.beat(rank), now) for rank in self._membership.ranks.values()]

    def next_check(self, now: float) -> float:
        """The latest time to call `tick` next."""
        # While steps are computed, the epoch has nothing else to wait for.
        due = self.epochs.cause_wait_ends if self.epochs.is_ready else self.epochs.next_check(now)
        if probes := self._liveness.probe_times:
            due = min(due, probes[0])
        return min(now + 1.0, due)

    def receive(self, now: float, ready: Container[object]) -> list[Event]:
        """Handles all messages that have arrived. ready: the sockets that have something, by a poll."""
        for _ in range(_MAX_MESSAGES):
            frames = self._socket.receive()
            if frames is None:
                break
            self._handle(frames, now)
        if self._socket.monitor in ready:
            self._watch_connections(now)
        if not self.epochs.is_open:
            self._begin_epoch_if_complete(now)
        return self._take_events() if self._events else []

    def tick(self, now: float) -> list[Event]:
        """Checks which ranks are alive. Call it about once a second and when `next_check` says so."""
        is_probing = self._liveness.take_due_probes(now)
        for rank in self._membership.ranks.values():
            if rank.is_present:
                if cause := self._liveness.why_lost(rank, now, is_probing=is_probing):
                    self._lose(rank, cause)
            elif self._liveness.is_back(rank, now):
                log.info("%s is back", rank.name)
                rank.is_present = True
                rank.enter(now)
                self.epochs.note_return(rank.instance, rank.instance)
        if consequence := self.epochs.unexplained(now):
            self._end_unexplained(consequence, now)
        self._begin_epoch_if_complete(now)
        return self._take_events()

    def send_plan(self, frame: bytes) -> list[Event]:
        """Sends every rank the same bytes; a rank that can't take them is lost."""
        assert self.epochs.is_ready
        for rank in self._membership.ranks.values():
            if why := self._socket.send_frame(rank.identity, frame):
                self._lose(rank, f"does not take plans: {why}")
                break
        return self._take_events() if self._events else []

    @property
    def encoding_ranks(self) -> range:
        """The ranks that encode items: those of the first stage."""
        return self._membership.terms.encoding_ranks

    def send_item(self, frame: bytes) -> list[Event]:
        """Sends an item to the ranks that encode; a rank that can't take it is lost."""
        assert self.is_ready
        for number in self.encoding_ranks:
            rank = self._membership.ranks[number]
            if why := self._socket.send_frame(rank.identity, frame):
                self._lose(rank, f"does not take items: {why}")
                break
        return self._take_events()

    def begin_epoch(self, epoch: int, rendezvous: str, now: float) -> list[Event]:
        """Begins an epoch of ranks in lockstep, which must be complete."""
        self._begin_epoch(epoch, rendezvous, now)
        return self._take_events()

    def end_epoch(self, cause: str) -> list[Event]:
        """Ends the epoch for a cause outside these ranks. They leave it, for ranks elsewhere may wait for them."""
        was_ready = self.epochs.is_ready
        self._end_epoch(cause)
        if was_ready:
            leave = step_pb2.SchedulerToWorker(leave=step_pb2.Leave(epoch=self.epoch))
            for rank in self._membership.ranks.values():
                if rank.is_present:
                    self._socket.send(rank.identity, leave)
        return self._take_events()

    def fail_epoch(self, cause: str) -> list[Event]:
        """Ends the epoch because the step loop found that these ranks failed; a new one begins."""
        self._end_epoch(cause, has_failed=True)
        return self._take_events()

    def give_up_step(self, cause: str) -> list[Event]:
        """Ends the epoch because a step has not returned; a new one begins."""
        self._end_unexplained(cause, time.monotonic())
        return self._take_events()

    def close(self, reason: str) -> None:
        """Tells the ranks to end. reason: empty for an orderly end, else why they have to fail as well."""
        present = [rank for rank in self._membership.ranks.values() if rank.is_present]
        try:
            for rank in present:
                for identity in {rank.identity, rank.previous_identity} - {None}:
                    self._socket.shut_down(identity or b"", reason, permanent=bool(reason))
        finally:
            self._socket.close()
        if all(rank.model is not None for rank in present):
            self.epochs.close()

    # --- Messages

    def _handle(self, frames: list[bytes], now: float) -> None:
        peer = frames[0]
        if len(frames) != 2:
            self._invalid.note(peer, f"{len(frames) - 1} frames instead of one WorkerToScheduler")
            return
        try:
            message = step_pb2.WorkerToScheduler.FromString(frames[1])
        except DecodeError:
            self._invalid.note(peer, f"{len(frames[1])} bytes that are not a WorkerToScheduler")
            return
        kind, ranks = message.WhichOneof("message"), self._membership.ranks
        rank = None
        for each in ranks.values():
            if peer in (each.identity, each.previous_identity):
                rank, each.heard = each, now
                break
        if kind == "hello" and peer.startswith(b"join-"):
            self._hear_hello(message.hello, peer, now)
        elif kind == "failure" and (rank is not None or peer.startswith(b"join-")):
            self._hear_failure(message.failure, rank, now)
        elif kind == "ready" and rank is not None:
            self._hear_ready(message.ready, rank, now)
        elif kind == "result" and rank is not None:
            self._hear_result(message.result, rank)
        elif kind == "item" and rank is not None:
            self._hear_item(message.item, rank)
        else:
            self._invalid.note(peer, f"an unknown peer sent {kind or 'an unknown message'}")

    def _hear_hello(self, hello: step_pb2.Hello, peer: bytes, now: float) -> None:
        answer = self._membership.admit(
            hello, peer, now, is_rightful=lambda rank: self._liveness.is_rightful(rank, now)
        )
        match answer:
            case Refused():
                self._socket.shut_down(peer, answer.reason, permanent=answer.permanent)
            case Joined():
                if answer.before is not None:
                    cause = f"was replaced by pid {hello.pid}"
                    self._lose(answer.before, cause)
                    # If it was only stopped, it hears this when it goes on.
                    self._socket.shut_down(answer.before.identity, f"{answer.before.name} {cause}", permanent=False)
                    self.epochs.note_return(answer.before.instance, hello.instance)
                log.info("%s has joined", answer.rank.name)
            case Returned():
                self._take_back(answer.rank, peer, now)

    def _take_back(self, rank: Rank, peer: bytes, now: float) -> None:
        was_waiting_for_reset = self.epochs.is_open and rank.model is None and rank.is_present
        rank.return_from(peer, now)
        self.epochs.note_return(rank.instance, rank.instance)
        if was_waiting_for_reset:
            self._reset(rank, now)  # the previous Reset went to a connection that the rank had left
        elif self.epochs.is_open:
            self._end_epoch(f"{rank.name} has left it and sent Hello again")

    def _hear_result(self, result: step_pb2.StepResult, rank: Rank) -> None:
        results_rank = self._membership.terms.results_rank
        if rank.rank != results_rank:
            self._invalid.note(rank.identity, f"a result, which only rank {results_rank} may send")
        elif self.epochs.is_ready and result.epoch == self.epochs.number:
            if self.epochs.pause:
                self.epochs.note_success()
            self._events.append(StepReturned(result=result))

    def _hear_item(self, item: step_pb2.ItemPrepared, rank: Rank) -> None:
        if self.is_ready and item.epoch == self.epoch:
            self._events.append(ItemAnswered(rank=rank.rank, number=item.number, error=item.error))

    def _hear_failure(self, failure: step_pb2.Failure, rank: Rank | None, now: float) -> None:
        who = rank.name if rank is not None else f"rank {failure.rank}"
        if failure.permanent and (rank is not None or not self._membership.is_present(failure.rank)):
            self._events.append(Fatal(cause=f"{who} failed for good: {failure.message}", permanent=True))
        elif failure.is_consequence:
            log.info("%s failed because of another rank: %s", who, failure.message)
            is_current = rank is not None and failure.epoch == self.epoch
            if is_current and self.epochs.await_cause(f"{who} failed: {failure.message}", now):
                self._liveness.probe_soon(now)
        elif rank is not None and failure.epoch == self.epoch:
            self._end_epoch(f"{who} failed: {failure.message}", has_failed=True)
        else:
            log.error("%s failed: %s", who, failure.message)

    def _hear_ready(self, ready: step_pb2.Ready, rank: Rank, now: float) -> None:
        if not self.epochs.is_open or ready.epoch != self.epoch or ready.rank != rank.rank:
            return  # the message is about an epoch that has ended meanwhile
        rank.enter(now)
        rank.model, rank.num_swap_blocks, rank.drafter = ready.model, ready.num_swap_blocks, ready.drafter
        rank.features, rank.holds_constrained = frozenset(ready.features), ready.holds_constrained
        rank.encoder_cache_size = ready.encoder_cache_size
        membership = self._membership
        try:
            if self.is_ready or not membership.agree():
                return
        except MembershipError as error:
            self._events.append(Fatal(cause=str(error), permanent=False))
            return
        assert membership.model is not None
        self._events.append(
            EpochBegun(
                epoch=self.epoch,
                model=membership.model,
                num_swap_blocks=membership.num_swap_blocks,
                features=membership.features,
                max_logprobs=membership.max_logprobs,
                holds_constrained=membership.holds_constrained,
                drafter=membership.drafter,
                encoder_cache_size=membership.encoder_cache_size,
                after_failure=self.epochs.become_ready(),
            )
        )

    def _watch_connections(self, now: float) -> None:
        while (event := self._socket.next_connection_event()) is not None:
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._invalid.note(b"CURVE", "a peer was refused, its key is not in allowed_workers/")
            else:
                self._liveness.probe_soon(now)

    # --- Epochs

    def _begin_epoch_if_complete(self, now: float) -> None:
        if not self._in_lockstep and not self.epochs.is_open and self.is_complete(now):
            self._begin_epoch(self.epoch + 1, self.epochs.next_address(self.store_address), now)

    def _begin_epoch(self, epoch: int, rendezvous: str, now: float) -> None:
        self.epochs.begin(epoch, rendezvous)
        for rank in self._membership.ranks.values():
            if self.epochs.is_open:
                self._reset(rank, now)

    def _reset(self, rank: Rank, now: float) -> None:
        reset = step_pb2.Reset(epoch=self.epoch, rendezvous=self.epochs.address, scheduler=self._scheduler)
        if self._socket.send(rank.identity, step_pb2.SchedulerToWorker(reset=reset)):
            rank.begin_reset(self.epoch, now)
        else:
            self._lose(rank, "is gone")

    def _end_epoch(self, cause: str, *, has_failed: bool = False, lost: Iterable[Rank] = ()) -> None:
        """Ends the epoch as Epochs.end does. lost: ranks that are gone, or may be."""
        if self.epochs.end(cause, has_failed=has_failed, lost_instances=[rank.instance for rank in lost]):
            self._events.append(EpochEnded(cause=cause))

    def _end_unexplained(self, cause: str, now: float) -> None:
        """Ends the epoch because a rank hangs. In lockstep it may be another replica's rank, so a rank here is only
        blamed if it comes back as another process."""
        ranks = self._membership.ranks.values()
        cause += self._liveness.silences(ranks, now)
        if self._in_lockstep:
            self._end_epoch(cause, lost=ranks)
        else:
            self._end_epoch(cause, has_failed=True)

    def _lose(self, rank: Rank, cause: str) -> None:
        if rank.is_present:
            rank.is_present = False
            # Outside an epoch this is normal: a rank that waits for others joins again from time to time.
            level = logging.WARNING if self.epochs.is_open else logging.INFO
            log.log(level, "%s is lost: it %s", rank.name, cause)
            self._end_epoch(f"{rank.name} {cause}", lost=[rank])

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
