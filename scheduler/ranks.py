"""One rank as its scheduler sees it."""

from dataclasses import dataclass, field

from protos import inference_pb2, step_pb2
from runtime.wire import rank_identity
from scheduler.heartbeats import Beat


@dataclass(slots=True, kw_only=True)
class Rank:
    """A worker process that has said Hello. Times are monotonic seconds.

    identity: where messages for it go. previous_identity: where it is until it has connected anew after a Reset.
    """

    rank: int
    instance: int
    pid: int
    identity: bytes
    # Where the ranks' store is, if it is in this process.
    store_address: str = ""
    # False: dead, silent or gone as far as is known; it has to be back before an epoch can begin.
    is_present: bool = True
    previous_identity: bytes | None = None
    # It has been seen under `identity`.
    has_entered: bool = True
    # Of the epoch in force; None until Ready.
    model: inference_pb2.ModelInfo | None = None
    # Host blocks for swapped KV, as its Ready told.
    num_swap_blocks: int = 0
    # Last sign of life other than heartbeats.
    heard: float = 0.0
    reset_at: float = 0.0
    # Under no identity, since then.
    unreachable_since: float | None = None
    # Step timeouts that have been complained of since the Reset.
    num_complaints: int = field(default=0)

    @classmethod
    def of(cls, hello: step_pb2.Hello, identity: bytes, now: float) -> "Rank":
        return cls(
            rank=hello.rank,
            instance=hello.instance,
            pid=hello.pid,
            identity=identity,
            store_address=hello.store_address,
            heard=now,
        )

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} (pid {self.pid})"

    def describe(self, beat: Beat | None) -> str:
        """What it does, for people. beat: its latest heartbeat."""
        if beat is None:
            return f"{self.name} is starting"
        state = step_pb2.WorkerState.Name(beat.state).removeprefix("WORKER_STATE_").lower()
        return f"{self.name} is {state}" + (f", {beat.progress:.0%}" if beat.progress else "")

    def begin_reset(self, epoch: int, now: float) -> None:
        """A Reset is on its way to where it is now; from there it moves on."""
        self.previous_identity = self.identity
        self.identity = rank_identity(epoch, self.rank)
        self.has_entered = False
        self.model = None
        self.reset_at = self.heard = now
        self.unreachable_since = None
        self.num_complaints = 0

    def enter(self, now: float) -> None:
        """It has been seen under its identity of this epoch."""
        self.has_entered = True
        self.previous_identity = None
        self.unreachable_since = None
        self.heard = now

    def return_from(self, identity: bytes, now: float) -> None:
        """The same process says Hello again, from another identity."""
        self.identity, self.previous_identity = identity, None
        self.has_entered = True
        self.is_present = True
        self.model = None
        self.unreachable_since = None
        self.heard = now
