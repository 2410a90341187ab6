"""Decides the epochs and waves of replicas that compute their steps together, from the states that they report.

No I/O and no clock; times are monotonic seconds.
"""

import logging
from dataclasses import dataclass

from configs.options import Options
from protos import coordination_pb2 as pb
from runtime.awake_time import AwakeTime
from runtime.wire import PROTOCOL_VERSION, octavo_version
from scheduler.ranks.epochs import Rendezvous

log = logging.getLogger("octavo.scheduler")

# A replica keeps others waiting if its last plan is older than this and they are ahead of it.
_BEHIND_S = 2.0
_LONGEST_CAUSE = 2000
# Options that must be equal in all replicas, because the replicas make the same collective calls in each step.
_COMMON = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_steps_in_flight",
    "num_redundant_experts",
    "eplb_step_interval",
)
_OVER = frozenset({pb.REPLICA_CONDITION_INCOMPLETE, pb.REPLICA_CONDITION_COMPLETE})


def common_options(options: Options) -> dict[str, int]:
    """The options that must be equal in all replicas, for ReplicaState."""
    return {name: getattr(options, name) for name in _COMMON}


@dataclass(slots=True)
class _Replica:
    """A connected scheduler."""

    state: pb.ReplicaState
    heard: float
    # The time when its epoch or last step changed.
    step_since: float


class Agreement:
    """The coordinator's view of all replicas, numbered from 0."""

    def __init__(
        self,
        options: Options,
        rendezvous: Rendezvous,
        awake: AwakeTime,
        *,
        instance: int,
        epoch: int,
        heartbeat_timeout: float,
    ) -> None:
        """awake: of the step loop. instance: a number of this coordinator. epoch: the first epoch is higher than
        this."""
        self._options, self._rendezvous, self._awake = options, rendezvous, awake
        self._heartbeat_timeout = heartbeat_timeout
        self._replicas: dict[int, _Replica] = {}
        self._group = pb.GroupState(instance=instance, epoch=epoch)
        # True once the ranks of the latest epoch have met; until then they may wait at its rendezvous.
        self._have_met = True

    @property
    def group(self) -> pb.GroupState:
        """The state that is sent to all replicas; read only."""
        return self._group

    @property
    def members(self) -> list[tuple[int, int]]:
        """Replica and instance of the connected schedulers."""
        return [(number, each.state.instance) for number, each in self._replicas.items()]

    def objection(self, state: pb.ReplicaState) -> str:
        """The reason why a replica can't take part; empty if it can."""
        asked: dict[str, tuple[object, object]] = {
            "protocol_version": (state.protocol_version, PROTOCOL_VERSION),
            "octavo_version": (state.octavo_version, octavo_version()),
        }
        for name, ours in common_options(self._options).items():
            asked[name] = state.options.get(name), ours
        for name, (theirs, ours) in asked.items():
            if theirs != ours:
                return f"{name} is {theirs!r} at replica {state.replica} but {ours!r} at replica 0: give both the same"
        if state.replica >= self._options.data_parallel_size:
            return f"replica {state.replica} is not among data_parallel_size={self._options.data_parallel_size}"
        for number, each in self._replicas.items():
            ours = each.state.fingerprint
            if number != state.replica and ours and state.fingerprint and ours != state.fingerprint:
                return (
                    f"the model's fingerprint is {state.fingerprint} at replica {state.replica} but {ours} at replica "
                    f"{number}: give both the same weights, dtype, quantization, and kind of device"
                )
        return ""

    def hear(self, state: pb.ReplicaState, now: float) -> None:
        """Takes in a replica's state, which must have no objection."""
        number, group = state.replica, self._group
        before = self._replicas.get(number)
        if before is not None and before.state.instance != state.instance:
            self.lose(number, "was restarted")
            before = None
        is_same_step = before is not None and (before.state.epoch, before.state.step) == (state.epoch, state.step)
        self._replicas[number] = _Replica(state, now, before.step_since if before and is_same_step else now)
        if state.epoch > group.epoch:
            # The epoch was begun by an earlier coordinator.
            self._end(f"replica {number} was in a later epoch")
            group.epoch = state.epoch
        elif state.epoch == group.epoch and group.is_open:
            self._hear_of_epoch(state)
        self._begin_if_complete()
        group.waiting_for = self._waiting_for(now)

    def _hear_of_epoch(self, state: pb.ReplicaState) -> None:
        """Takes in a replica's state in the current epoch."""
        if state.condition in _OVER:
            self._end(f"replica {state.replica}: {state.cause}")
        elif state.condition == pb.REPLICA_CONDITION_READY:
            if not self._have_met:
                self._have_met = True
                self._rendezvous.remove_all_but(self._group.epoch)
            self._group.wave_step = max(self._group.wave_step, state.wanted_step)

    def lose(self, number: int, why: str) -> None:
        """Removes a scheduler that is gone. why: for example "has disconnected"."""
        if self._replicas.pop(number, None) is not None:
            self._end(f"the scheduler of replica {number} {why}")

    def tick(self, now: float) -> None:
        """Checks for silent replicas. Call it about once a second."""
        for number, each in list(self._replicas.items()):
            silence = self._awake.seconds(each.heard, now)
            if silence > self._heartbeat_timeout:
                self.lose(
                    number, f"has been silent for {silence:.1f} s (heartbeat_timeout={self._heartbeat_timeout:g})"
                )
        self._group.waiting_for = self._waiting_for(now)

    def close(self) -> None:
        """Removes the meeting places: this coordinator begins no further epoch."""
        if self._have_met:
            self._rendezvous.remove_all_but(None)

    # --- Epochs

    def _begin_if_complete(self) -> None:
        group, states = self._group, [each.state for each in self._replicas.values()]
        if group.is_open or len(states) < self._options.data_parallel_size:
            return
        # A replica that has not heard of the last epoch's end may still be in it.
        if any((s.epoch, s.condition) != (group.epoch, pb.REPLICA_CONDITION_COMPLETE) for s in states):
            return
        group.epoch += 1
        group.is_open, group.cause, group.wave_step = True, "", 0
        self._have_met = False
        group.rendezvous = self._rendezvous.address(group.epoch, self._replicas[0].state.store_address)
        log.info("epoch %d begins in all %d replicas", group.epoch, len(states))

    def _end(self, cause: str) -> None:
        if self._group.is_open:
            self._group.is_open, self._group.cause = False, cause[:_LONGEST_CAUSE]
            log.warning("epoch %d has ended in all replicas: %s", self._group.epoch, cause)

    # --- Descriptions

    def _waiting_for(self, now: float) -> str:
        if self._group.is_open:
            awaited = [number for number, each in self._replicas.items() if self._is_late(each)]
            awaited = awaited or self._behind(now)
        else:
            awaited = [
                number
                for number in range(self._options.data_parallel_size)
                if number not in self._replicas
                or self._replicas[number].state.condition != pb.REPLICA_CONDITION_COMPLETE
            ]
        return ", ".join(self._describe(number) for number in sorted(awaited)[:4])

    def _is_late(self, replica: _Replica) -> bool:
        """True if a replica is not ready in the current epoch yet."""
        return replica.state.condition != pb.REPLICA_CONDITION_READY or replica.state.epoch != self._group.epoch

    def _behind(self, now: float) -> list[int]:
        most = max((each.state.step for each in self._replicas.values()), default=0)
        return [
            number
            for number, each in self._replicas.items()
            if each.state.step < most and now - each.step_since > _BEHIND_S
        ]

    def _describe(self, number: int) -> str:
        replica = self._replicas.get(number)
        if replica is None:
            return f"replica {number}, whose scheduler is not connected"
        if replica.state.condition == pb.REPLICA_CONDITION_READY:
            return f"replica {number}, whose last plan is step {replica.state.step}"
        return f"replica {number} ({replica.state.description})"
