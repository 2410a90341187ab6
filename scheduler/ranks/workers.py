"""The ranks of one replica over ZeroMQ: who has joined, which epoch they are in, and whether they live.

The protocol is told in protos/step.proto. Everything here happens on the step loop's thread; what it means for the
requests is the step loop's business, told in events.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import zmq
from google.protobuf.message import DecodeError

from protos import inference_pb2, step_pb2
from scheduler.ranks.epochs import EpochBegun, EpochEnded, Epochs, Event, Fatal, Rendezvous, StepReturned
from scheduler.ranks.heartbeats import Beat, Heartbeats
from scheduler.ranks.membership import MembershipError, Rank, Terms
from scheduler.ranks.step_wire import RankSocket
from scheduler.sockets import InvalidMessages

log = logging.getLogger("octavo.scheduler")

# One round of the loop reads so many messages at most, so that a flood holds up no step.
_MAX_MESSAGES = 256
# A rank between two identities is nowhere for a moment.
_REENTRY_GRACE_S = 5.0
# A rank heard from so recently lives: another process that says Hello for it is one too many.
_ALIVE_S = 3.0
# ZeroMQ reports a disconnect a little before it forgets the peer, so the peers are probed more than once.
_PROBE_DELAYS_S = (0.0, 0.02, 0.2, 1.0)
# Heartbeats come each second.
_MISSED_BEATS_S = 2.0


class Workers:
    """Collects Hellos until every rank is there, begins epochs, passes plans and results, notices deaths."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        curve_dir: Path | None,
        terms: Terms,
        heartbeats: Heartbeats,
        invalid: InvalidMessages,
        *,
        rendezvous: Rendezvous | None,
        in_lockstep: bool,
        heartbeat_timeout: float,
        step_timeout: float,
    ) -> None:
        """rendezvous: None if the ranks meet nobody, or others say where. in_lockstep: ranks of other replicas are in
        the same epochs, which begin and end when `begin_epoch` and `end_epoch` say so; and a rank that has not
        returned may wait for these. Raises AddressError or CurveError."""
        self._socket = RankSocket(context, endpoint, curve_dir)
        self._terms, self._heartbeats, self._invalid = terms, heartbeats, invalid
        self._rendezvous, self._in_lockstep = rendezvous, in_lockstep
        self._heartbeat_timeout, self._step_timeout = heartbeat_timeout, step_timeout
        self._ranks: dict[int, Rank] = {}
        # Begun and ended here; others may be passed over.
        self.epochs = Epochs()
        # What was served last; to be read only.
        self.model: inference_pb2.ModelInfo | None = None
        self._model_name = terms.model
        # Where the ranks of the epoch in force meet.
        self._address = ""
        self._events: list[Event] = []
        self._probe_times: list[float] = []

    # --- For the step loop

    @property
    def sockets(self) -> list[zmq.Socket]:
        """To be polled for input."""
        return [self._socket.socket, self._socket.monitor]

    @property
    def epoch(self) -> int:
        return self.epochs.number

    @property
    def is_ready(self) -> bool:
        """Plans can be sent."""
        return self.epochs.is_ready

    @property
    def store_address(self) -> str:
        """As the first rank's Hello said; empty if it has not come yet."""
        return self._ranks[0].store_address if 0 in self._ranks else ""

    def is_complete(self, now: float) -> bool:
        """An epoch can begin: all ranks are present, and in none.

        A rank that has not followed its last Reset yet, for it is in a step that waits for another rank, is nowhere
        that the next Reset could be sent to: it is waited for.
        """
        return self.epochs.may_begin(now) and all(
            self._is_present(rank) and self._ranks[rank].has_entered for rank in range(self._terms.world_size)
        )

    def describe(self) -> str:
        """In a few words, for /health."""
        if self.is_ready:
            return f"epoch {self.epoch}"
        missing = [str(rank) for rank in range(self._terms.world_size) if not self._is_present(rank)]
        if missing:
            return f"waiting for rank {', '.join(missing)} of {self._terms.world_size}"
        return "; ".join(rank.describe(self._beat(rank)) for rank in self._ranks.values())

    def next_check(self, now: float) -> float:
        """When `tick` should be called next, at the latest."""
        return min(now + 1.0, *self._probe_times[:1], self.epochs.next_check(now))

    def receive(self, now: float) -> list[Event]:
        """Handles what has arrived."""
        for _ in range(_MAX_MESSAGES):
            frames = self._socket.receive()
            if frames is None:
                break
            self._handle(frames, now)
        self._watch_connections(now)
        self._begin_epoch_if_complete(now)
        return self._take_events()

    def tick(self, now: float) -> list[Event]:
        """Checks who lives, about once a second and when `next_check` says so."""
        is_probing = bool(self._probe_times) and self._probe_times[0] <= now
        self._probe_times = [at for at in self._probe_times if at > now]
        for rank in self._ranks.values():
            if rank.is_present:
                if is_probing or not rank.has_entered:
                    self._check_connection(rank, now)
                self._check_signs_of_life(rank, now)
            elif now - self._heard(rank) <= _ALIVE_S and self._socket.is_reachable(rank.identity):
                log.info("%s is back", rank.name)
                rank.is_present = True
                rank.enter(now)
                self.epochs.note_return(rank.instance, rank.instance)
        if consequence := self.epochs.unexplained(now):
            self._end_unexplained(consequence + self._silences(now))
        self._begin_epoch_if_complete(now)
        return self._take_events()

    def send_plan(self, frame: bytes) -> list[Event]:
        """Sends every rank the same bytes; a rank that can't take them is lost."""
        assert self.is_ready
        for rank in self._ranks.values():
            if why := self._socket.send_frame(rank.identity, frame):
                self._lose(rank, f"does not take plans: {why}")
                break
        return self._take_events()

    def begin_epoch(self, epoch: int, rendezvous: str, now: float) -> list[Event]:
        """For ranks in lockstep, which are complete."""
        self._begin_epoch(epoch, rendezvous, now)
        return self._take_events()

    def end_epoch(self, cause: str) -> list[Event]:
        """Nothing that these ranks have done is why."""
        self._end_epoch(cause)
        return self._take_events()

    def fail_epoch(self, cause: str) -> list[Event]:
        """These ranks have failed, in the step loop's judgement: they begin anew."""
        self._end_epoch(cause, has_failed=True)
        return self._take_events()

    def give_up_step(self, cause: str) -> list[Event]:
        """A step has not returned: the ranks begin anew."""
        self._end_unexplained(cause + self._silences(time.monotonic()))
        return self._take_events()

    def close(self, reason: str) -> None:
        """Sends the ranks home. reason: empty for an orderly end, else why they have to fail as well."""
        for rank in self._ranks.values():
            if rank.is_present:
                for identity in {rank.identity, rank.previous_identity} - {None}:
                    self._socket.shut_down(identity or b"", reason, permanent=bool(reason))
        self._socket.close()
        is_awaited = any(rank.is_present and rank.model is None for rank in self._ranks.values())
        if self._rendezvous is not None and not is_awaited:
            self._rendezvous.remove_all_but(None)

    # --- Messages

    def _handle(self, frames: list[bytes], now: float) -> None:
        peer = frames[0]
        if len(frames) != 2:
            self._invalid.note(peer, f"{len(frames) - 1} frames; one frame holds one WorkerToScheduler")
            return
        try:
            message = step_pb2.WorkerToScheduler.FromString(frames[1])
        except DecodeError:
            self._invalid.note(peer, f"{len(frames[1])} bytes that are no WorkerToScheduler")
            return
        kind = message.WhichOneof("message")
        rank = next((each for each in self._ranks.values() if peer in (each.identity, each.previous_identity)), None)
        if rank is not None:
            rank.heard = now
        if kind == "hello" and peer.startswith(b"join-"):
            self._hear_hello(message.hello, peer, now)
        elif kind == "failure" and (rank is not None or peer.startswith(b"join-")):
            self._hear_failure(message.failure, rank, now)
        elif kind == "ready" and rank is not None:
            self._hear_ready(message.ready, rank, now)
        elif kind == "result" and rank is not None:
            self._hear_result(message.result, rank)
        else:
            self._invalid.note(peer, f"an unknown peer sent {kind or 'nothing known'}")

    def _hear_hello(self, hello: step_pb2.Hello, peer: bytes, now: float) -> None:
        if objection := self._terms.objection(hello, self._model_name):
            log.error("rank %d (pid %d) is refused: %s", hello.rank, hello.pid, objection)
            self._socket.shut_down(peer, objection, permanent=True)
            return
        known = self._ranks.get(hello.rank)
        if known is not None and known.instance == hello.instance:
            self._hear_hello_again(known, peer, now)
            return
        if known is not None and known.is_present:
            if self._is_rightful(known, now):
                text = f"{known.name} is there and alive: end it first"
                log.error("another process (pid %d) wants to be rank %d; %s", hello.pid, hello.rank, text)
                self._socket.shut_down(peer, text, permanent=False)
                return
            self._lose(known, f"was replaced by pid {hello.pid}")
        if known is not None:
            self.epochs.note_return(known.instance, hello.instance)
        self._model_name = hello.model
        self._ranks[hello.rank] = Rank.of(hello, peer, now)
        log.info("%s has joined", self._ranks[hello.rank].name)

    def _hear_hello_again(self, rank: Rank, peer: bytes, now: float) -> None:
        if peer == rank.identity or peer == rank.previous_identity:
            return  # said before its Reset came
        was_waiting_for_reset = self.epochs.is_open and rank.model is None and rank.is_present
        rank.return_from(peer, now)
        self.epochs.note_return(rank.instance, rank.instance)
        if was_waiting_for_reset:
            self._reset(rank, now)  # the one before went to a connection that it had left
        elif self.epochs.is_open:
            self._end_epoch(f"{rank.name} has left it and says Hello again")

    def _hear_result(self, result: step_pb2.StepResult, rank: Rank) -> None:
        if rank.rank != self._terms.results_rank:
            self._invalid.note(rank.identity, f"a result, which is rank {self._terms.results_rank}'s to send")
        elif self.is_ready and result.epoch == self.epoch:
            self.epochs.note_success()
            self._events.append(StepReturned(result=result))

    def _hear_failure(self, failure: step_pb2.Failure, rank: Rank | None, now: float) -> None:
        who = rank.name if rank is not None else f"rank {failure.rank}"
        if failure.permanent and (rank is not None or not self._is_present(failure.rank)):
            self._events.append(Fatal(cause=f"{who} failed for good: {failure.message}", permanent=True))
        elif failure.is_consequence:
            log.info("%s failed because of another rank: %s", who, failure.message)
            is_current = rank is not None and failure.epoch == self.epoch
            if is_current and self.epochs.await_cause(f"{who} failed: {failure.message}", now):
                self._probe_times = [now + delay for delay in _PROBE_DELAYS_S]
        elif rank is not None and failure.epoch == self.epoch:
            self._end_epoch(f"{who} failed: {failure.message}", has_failed=True)
        else:
            log.error("%s failed: %s", who, failure.message)

    def _hear_ready(self, ready: step_pb2.Ready, rank: Rank, now: float) -> None:
        if not self.epochs.is_open or ready.epoch != self.epoch or ready.rank != rank.rank:
            return  # of an epoch that has ended meanwhile
        rank.enter(now)
        rank.model, rank.num_swap_blocks = ready.model, ready.num_swap_blocks
        models = [self._ranks[number].model for number in sorted(self._ranks)]
        known = [model for model in models if model is not None]
        if self.is_ready or len(known) < self._terms.world_size:
            return
        try:
            self.model = self._terms.agree(known, self.model)
        except MembershipError as error:
            self._events.append(Fatal(cause=str(error), permanent=False))
            return
        if self._rendezvous is not None:
            self._rendezvous.remove_all_but(self.epoch)
        self._events.append(
            EpochBegun(
                epoch=self.epoch,
                model=self.model,
                num_swap_blocks=min(rank.num_swap_blocks for rank in self._ranks.values()),
                after_failure=self.epochs.become_ready(),
            )
        )

    # --- Epochs

    def _begin_epoch_if_complete(self, now: float) -> None:
        if not self._in_lockstep and self.is_complete(now):
            epoch, rendezvous = self.epoch + 1, self._rendezvous
            self._begin_epoch(epoch, "" if rendezvous is None else rendezvous.address(epoch, self.store_address), now)

    def _begin_epoch(self, epoch: int, rendezvous: str, now: float) -> None:
        self.epochs.begin(epoch)
        self._address = rendezvous
        for rank in self._ranks.values():
            if self.epochs.is_open:
                self._reset(rank, now)

    def _reset(self, rank: Rank, now: float) -> None:
        reset = step_pb2.Reset(epoch=self.epoch, rendezvous=self._address, scheduler=self._heartbeats.instance)
        if self._socket.send(rank.identity, step_pb2.SchedulerToWorker(reset=reset)):
            rank.begin_reset(self.epoch, now)
        else:
            self._lose(rank, "is gone")

    def _end_epoch(self, cause: str, *, has_failed: bool = False, lost: Iterable[Rank] = ()) -> None:
        """As scheduler.ranks.epochs.Epochs.end. lost: ranks that went, or may have."""
        if self.epochs.end(cause, has_failed=has_failed, lost_instances=[rank.instance for rank in lost]):
            self._events.append(EpochEnded(cause=cause))

    def _end_unexplained(self, cause: str) -> None:
        """A rank hangs. If it is not clear in which replica, it will be seen whose rank has to be started again."""
        if self._in_lockstep:
            self._end_epoch(cause, lost=self._ranks.values())
        else:
            self._end_epoch(cause, has_failed=True)

    def _lose(self, rank: Rank, cause: str) -> None:
        if rank.is_present:
            rank.is_present = False
            # One that waits for others to join joins anew now and then.
            level = logging.WARNING if self.epochs.is_open else logging.INFO
            log.log(level, "%s is lost: it %s", rank.name, cause)
            self._end_epoch(f"{rank.name} {cause}", lost=[rank])

    # --- Liveness

    def _check_connection(self, rank: Rank, now: float) -> None:
        """ROUTER_MANDATORY tells who is there."""
        if self._socket.is_reachable(rank.identity):
            if not rank.has_entered:
                rank.enter(now)
        elif rank.has_entered:
            self._lose(rank, "has disconnected")
        elif rank.previous_identity is None or not self._socket.is_reachable(rank.previous_identity):
            rank.unreachable_since = rank.unreachable_since or now
            if now - rank.unreachable_since > _REENTRY_GRACE_S:
                self._lose(rank, "has disconnected and has not come back")

    def _check_signs_of_life(self, rank: Rank, now: float) -> None:
        silence = now - self._heard(rank)
        if silence > self._heartbeat_timeout:
            self._lose(rank, f"has been silent for {silence:.1f} s (heartbeat_timeout={self._heartbeat_timeout:g})")
        elif self._is_awaited(rank):
            self._complain_if_hung(rank, now)

    def _complain_if_hung(self, rank: Rank, now: float) -> None:
        """A rank may load for long; one that is still in a step of an epoch that has ended is another matter."""
        beat, wait = self._beat(rank), now - rank.reset_at
        is_stepping = beat is not None and beat.state == step_pb2.WORKER_STATE_STEPPING
        if is_stepping and wait > (rank.num_complaints + 1) * self._step_timeout:
            rank.num_complaints += 1
            log.error("%s has not left its step for %.0f s: end that process if it hangs", rank.name, wait)

    def _watch_connections(self, now: float) -> None:
        while (event := self._socket.next_connection_event()) is not None:
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._invalid.note(b"CURVE", "a peer whose key is not in allowed_workers/ was turned away")
            else:
                self._probe_times = [now + delay for delay in _PROBE_DELAYS_S]

    def _is_present(self, rank: int) -> bool:
        return rank in self._ranks and self._ranks[rank].is_present

    def _is_rightful(self, rank: Rank, now: float) -> bool:
        """Alive, and not stuck since its Reset."""
        is_stuck = self._is_awaited(rank) and rank.num_complaints > 0
        is_there = self._socket.is_reachable(rank.identity) or (
            rank.previous_identity is not None and self._socket.is_reachable(rank.previous_identity)
        )
        return is_there and not is_stuck and now - self._heard(rank) <= _ALIVE_S

    def _is_awaited(self, rank: Rank) -> bool:
        """It is to get ready, or at least to follow its last Reset."""
        return rank.model is None and (self.epochs.is_open or not rank.has_entered)

    def _silences(self, now: float) -> str:
        """Of ranks that may be why a step does not return, to be put behind what has failed."""
        silences = [(rank.name, now - self._heard(rank)) for rank in self._ranks.values()]
        return "".join(f"; {name} has been silent for {s:.1f} s" for name, s in silences if s > _MISSED_BEATS_S)

    def _heard(self, rank: Rank) -> float:
        beat = self._beat(rank)
        return max(rank.heard, beat.heard) if beat else rank.heard

    def _beat(self, rank: Rank) -> Beat | None:
        return self._heartbeats.latest(rank.rank, rank.instance)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
