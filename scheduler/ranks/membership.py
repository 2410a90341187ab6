"""The ranks of a replica as their scheduler knows them, and what they must agree on. No I/O and no clock."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from configs.options import Options
from protos import inference_pb2, step_pb2
from runtime.wire import PROTOCOL_VERSION, octavo_version, rank_identity
from scheduler.ranks.heartbeats import Beat

log = logging.getLogger("octavo.scheduler")


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
        """For people: its state. beat: its latest heartbeat."""
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


# Each rank has as much as its memory allows.
_OF_MEMORY = frozenset({"num_blocks", "max_model_len"})


class MembershipError(ValueError):
    """Ranks that can't work together; the message names what differs, and both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requirements on ranks that join. model: empty takes the one that the first rank names. results_rank: the one that
    returns results, the first of the last stage."""

    model: str
    world_size: int
    results_rank: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, options: Options) -> "Terms":
        return cls(
            model=options.served_model_name,
            world_size=options.world_size,
            results_rank=options.world_size - options.tensor_parallel_size,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
        )

    def objection(self, hello: step_pb2.Hello, model: str) -> str | None:
        """Why a rank can't join; None if it can. model: the name in force, empty if none is yet."""
        asked: dict[str, tuple[object, object]] = {
            "protocol_version": (hello.protocol_version, PROTOCOL_VERSION),
            "octavo_version": (hello.octavo_version, octavo_version()),
            "world_size": (hello.world_size, self.world_size),
            "served_model_name": (hello.model, model or hello.model),
            "block_size": (hello.block_size, self.block_size),
            "max_num_seqs": (hello.max_num_seqs, self.max_num_seqs),
            "max_num_batched_tokens": (hello.max_num_batched_tokens, self.max_num_batched_tokens),
        }
        for name, (theirs, ours) in asked.items():
            if theirs != ours:
                return f"{name} is {theirs!r} at the worker but {ours!r} at the scheduler: give both the same"
        if hello.rank >= self.world_size:
            return f"rank is {hello.rank}, but world_size={self.world_size} has ranks 0 to {self.world_size - 1}"
        return None

    def agree(
        self, models: Sequence[inference_pb2.ModelInfo], before: inference_pb2.ModelInfo | None
    ) -> inference_pb2.ModelInfo:
        """The model of all ranks, with the least of their block counts and of what these let sequences be.

        before: what an earlier epoch served; streams go on only if it is the same still. Raises MembershipError.
        """
        agreed = inference_pb2.ModelInfo()
        agreed.CopyFrom(models[0])
        agreed.num_blocks = min(model.num_blocks for model in models)
        agreed.max_model_len = min(model.max_model_len for model in models)
        for rank, model in enumerate(models[1:], start=1):
            _compare(model, f"rank {rank}", agreed, "rank 0", _OF_MEMORY)
        if before is not None:
            _compare(agreed, "this epoch of workers", before, "the one before it", {"num_blocks"})
        if not agreed.num_blocks:
            raise MembershipError("num_blocks is 0: the KV cache holds no block; raise kv_cache_memory")
        if agreed.block_size != self.block_size:
            raise MembershipError(f"block_size is {agreed.block_size} at the workers, not {self.block_size}")
        if agreed.max_model_len < 2 or (self.max_model_len and agreed.max_model_len > self.max_model_len):
            raise MembershipError(
                f"max_model_len is {agreed.max_model_len} at the workers but {self.max_model_len} at the scheduler"
            )
        return agreed


def _compare(
    one: inference_pb2.ModelInfo,
    whose: str,
    other: inference_pb2.ModelInfo,
    whose_other: str,
    may_differ: Collection[str],
) -> None:
    for each in inference_pb2.ModelInfo.DESCRIPTOR.fields:
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if each.name not in may_differ and mine != theirs:
            raise MembershipError(f"{each.name} is {mine!r} at {whose} but {theirs!r} at {whose_other}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """before: the process that was this rank until now; None: there was none."""

    rank: Rank
    before: Rank | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A process that has joined before says Hello from another connection."""

    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """permanent: it would be refused again."""

    reason: str
    permanent: bool


class Membership:
    """The ranks that have joined, and the model that they serve."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        # By number; to be read only.
        self.ranks: dict[int, Rank] = {}
        self._model_name = terms.model
        # As of the latest epoch in which all ranks were ready; to be read only.
        self.model: inference_pb2.ModelInfo | None = None

    @property
    def missing(self) -> list[int]:
        """Numbers of ranks that are not present."""
        return [rank for rank in range(self.terms.world_size) if not self.is_present(rank)]

    @property
    def have_entered(self) -> bool:
        """All ranks are present, and where the next Reset can be sent to: none is still in a step of an epoch that has
        ended, which waits for another rank."""
        return not self.missing and all(rank.has_entered for rank in self.ranks.values())

    @property
    def store_address(self) -> str:
        """As the first rank's Hello said; empty if it has not come yet."""
        return self.ranks[0].store_address if 0 in self.ranks else ""

    @property
    def num_swap_blocks(self) -> int:
        """The least of all ranks."""
        return min(rank.num_swap_blocks for rank in self.ranks.values())

    def is_present(self, rank: int) -> bool:
        return rank in self.ranks and self.ranks[rank].is_present

    def admit(
        self, hello: step_pb2.Hello, identity: bytes, now: float, *, is_rightful: Callable[[Rank], bool]
    ) -> Joined | Returned | Refused | None:
        """None: it has said so before, from the same connection.

        is_rightful: asked about the process that is this rank already: alive, so that another one is one too many.
        """
        if objection := self.terms.objection(hello, self._model_name):
            log.error("rank %d (pid %d) is refused: %s", hello.rank, hello.pid, objection)
            return Refused(reason=objection, permanent=True)
        known = self.ranks.get(hello.rank)
        if known is not None and known.instance == hello.instance:
            return None if identity in (known.identity, known.previous_identity) else Returned(rank=known)
        if known is not None and known.is_present and is_rightful(known):
            reason = f"{known.name} is there and alive: end it first"
            log.error("another process (pid %d) wants to be rank %d; %s", hello.pid, hello.rank, reason)
            return Refused(reason=reason, permanent=False)
        self._model_name = hello.model
        rank = self.ranks[hello.rank] = Rank.of(hello, identity, now)
        return Joined(rank=rank, before=known)

    def agree(self) -> bool:
        """Sets `model` once every rank has said Ready; False until then. Raises MembershipError."""
        models = [self.ranks[number].model for number in sorted(self.ranks)]
        known = [model for model in models if model is not None]
        if len(known) < self.terms.world_size:
            return False
        self.model = self.terms.agree(known, self.model)
        return True
