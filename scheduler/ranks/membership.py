"""The ranks of a replica, and the values that they must agree on. No I/O and no clock."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from configs.options import Options
from configs.sampling import MAX_LOGPROBS
from protos import inference_pb2, step_pb2
from runtime.wire import PROTOCOL_VERSION, octavo_version, rank_identity
from scheduler.ranks.heartbeats import Beat

log = logging.getLogger("octavo.scheduler")


@dataclass(slots=True, kw_only=True)
class Rank:
    """A worker process that has said Hello. Times are monotonic seconds.

    identity: the ZeroMQ identity that messages are sent to. previous_identity: the one that it keeps until it has
    connected anew after a Reset.
    """

    rank: int
    instance: int
    pid: int
    identity: bytes
    # Address of the ranks' store, if this process holds it.
    store_address: str = ""
    # False if it seems dead, silent or gone; it must be back before an epoch can begin.
    is_present: bool = True
    previous_identity: bytes | None = None
    # True once it was seen under `identity`.
    has_entered: bool = True
    # The model in the current epoch's Ready; None until then.
    model: inference_pb2.ModelInfo | None = None
    # Host blocks for swapped KV, features, how it plans constraints, its drafter, and its cache of embeddings, from its
    # Ready.
    num_swap_blocks: int = 0
    features: frozenset[str] = frozenset()
    holds_constrained: bool = False
    drafter: str = ""
    encoder_cache_size: int = 0
    # From its Hello.
    max_logprobs: int = MAX_LOGPROBS
    # Time of the last sign of life other than heartbeats.
    heard: float = 0.0
    reset_at: float = 0.0
    # Since when it is reachable under neither identity.
    unreachable_since: float | None = None
    # Number of step timeouts logged since the Reset.
    num_complaints: int = field(default=0)

    @classmethod
    def of(cls, hello: step_pb2.Hello, identity: bytes, now: float) -> "Rank":
        return cls(
            rank=hello.rank,
            instance=hello.instance,
            pid=hello.pid,
            identity=identity,
            store_address=hello.store_address,
            max_logprobs=hello.max_logprobs or MAX_LOGPROBS,
            heard=now,
        )

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank} (pid {self.pid})"

    def describe(self, beat: Beat | None) -> str:
        """Describes its state in messages. beat: its latest heartbeat."""
        if beat is None:
            return f"{self.name} is starting"
        state = step_pb2.WorkerState.Name(beat.state).removeprefix("WORKER_STATE_").lower()
        return f"{self.name} is {state}" + (f", {beat.progress:.0%}" if beat.progress else "")

    def begin_reset(self, epoch: int, now: float) -> None:
        """Records a Reset, sent to the current identity; the rank then moves to the identity of the new epoch."""
        self.previous_identity = self.identity
        self.identity = rank_identity(epoch, self.rank)
        self.has_entered = False
        self.model = None
        self.reset_at = self.heard = now
        self.unreachable_since = None
        self.num_complaints = 0

    def enter(self, now: float) -> None:
        """Records that it was seen under its identity of this epoch."""
        self.has_entered = True
        self.previous_identity = None
        self.unreachable_since = None
        self.heard = now

    def return_from(self, identity: bytes, now: float) -> None:
        """Records that the same process said Hello again, from another identity."""
        self.identity, self.previous_identity = identity, None
        self.has_entered = True
        self.is_present = True
        self.model = None
        self.unreachable_since = None
        self.heard = now


# Fields that may differ, because they depend on a rank's memory.
_OF_MEMORY = frozenset({"num_blocks", "max_model_len"})


class MembershipError(ValueError):
    """Ranks that can't work together; the message names the field that differs and both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requirements on ranks that join.

    model: if empty, the first rank to join decides. results_rank: the rank that returns results, the first of the last
    stage.
    """

    model: str
    world_size: int
    results_rank: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    is_block_size_given: bool = True

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
            is_block_size_given="block_size" in options.model_fields_set,
        )

    @property
    def encoding_ranks(self) -> range:
        """The ranks of the first stage. Ranks of one stage are numbered in a row."""
        return range(self.world_size - self.results_rank)

    def objection(self, hello: step_pb2.Hello, model: str) -> str | None:
        """The reason why a rank can't join; None if it can. model: the current model name, empty if not known yet."""
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
        """The model of all ranks, with the minimum of their num_blocks and max_model_len.

        before: the model of an earlier epoch. Only num_blocks may differ from it, or streams could not continue. Raises
        MembershipError.
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
            raise MembershipError("num_blocks is 0: the KV cache has no room for a block; raise kv_cache_memory")
        # Workers choose the size for layers that carry a state, unless one is given.
        is_free = agreed.carries_states and not self.is_block_size_given
        if agreed.block_size != self.block_size and not is_free:
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
    """A process has joined as a rank. before: the process that had the rank until now; None: there was none."""

    rank: Rank
    before: Rank | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A process that joined before has said Hello from another connection."""

    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A process may not join. permanent: it would be refused again."""

    reason: str
    permanent: bool


class Membership:
    """The ranks that have joined, and the model that they serve."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        # By rank number; read only for callers.
        self.ranks: dict[int, Rank] = {}
        self._model_name = terms.model
        # The model of the latest epoch in which all ranks were ready, and the features that all of them had; read only
        # for callers.
        self.model: inference_pb2.ModelInfo | None = None
        self.features: frozenset[str] = frozenset()

    @property
    def missing(self) -> list[int]:
        """Numbers of ranks that are not present."""
        return [rank for rank in range(self.terms.world_size) if not self.is_present(rank)]

    @property
    def have_entered(self) -> bool:
        """True if all ranks are present and can receive the next Reset: none is still in a step of an ended epoch,
        waiting for another rank."""
        return not self.missing and all(rank.has_entered for rank in self.ranks.values())

    @property
    def store_address(self) -> str:
        """The store address in rank 0's Hello; empty before that."""
        return self.ranks[0].store_address if 0 in self.ranks else ""

    @property
    def num_swap_blocks(self) -> int:
        """The minimum over all ranks."""
        return min(rank.num_swap_blocks for rank in self.ranks.values())

    @property
    def encoder_cache_size(self) -> int:
        """The minimum over the ranks that encode."""
        return min(self.ranks[number].encoder_cache_size for number in self.terms.encoding_ranks)

    @property
    def holds_constrained(self) -> bool:
        """True if any rank needs it."""
        return any(rank.holds_constrained for rank in self.ranks.values())

    @property
    def drafter(self) -> str:
        """The drafter of the first rank that has one; empty: none has."""
        return next((rank.drafter for _, rank in sorted(self.ranks.items()) if rank.drafter), "")

    @property
    def max_logprobs(self) -> int:
        """The minimum over all ranks."""
        return min(rank.max_logprobs for rank in self.ranks.values())

    def is_present(self, rank: int) -> bool:
        return rank in self.ranks and self.ranks[rank].is_present

    def admit(
        self, hello: step_pb2.Hello, identity: bytes, now: float, *, is_rightful: Callable[[Rank], bool]
    ) -> Joined | Returned | Refused | None:
        """Decides about a Hello; None if it only repeats one from the same connection.

        is_rightful: returns True if the process that has this rank is alive and keeps it, so that another is refused.
        """
        if objection := self.terms.objection(hello, self._model_name):
            log.error("rank %d (pid %d) is refused: %s", hello.rank, hello.pid, objection)
            return Refused(reason=objection, permanent=True)
        known = self.ranks.get(hello.rank)
        if known is not None and known.instance == hello.instance:
            return None if identity in (known.identity, known.previous_identity) else Returned(rank=known)
        if known is not None and known.is_present and is_rightful(known):
            reason = f"{known.name} is alive: end it first"
            log.error("another process (pid %d) wants to be rank %d; %s", hello.pid, hello.rank, reason)
            return Refused(reason=reason, permanent=False)
        self._model_name = hello.model
        rank = self.ranks[hello.rank] = Rank.of(hello, identity, now)
        return Joined(rank=rank, before=known)

    def agree(self) -> bool:
        """Sets `model` and `features` once every rank has said Ready; False until then. Raises MembershipError."""
        models = [self.ranks[number].model for number in sorted(self.ranks)]
        known = [model for model in models if model is not None]
        if len(known) < self.terms.world_size:
            return False
        model = self.terms.agree(known, self.model)
        features = frozenset.intersection(*(rank.features for rank in self.ranks.values()))
        # A stream that needs one may be here.
        if lost := sorted(self.features - features):
            raise MembershipError(f"features: a worker lacks {', '.join(lost)}, which all had in the epoch before")
        self.model, self.features = model, features
        return True
