"""What ranks must agree on with their scheduler and with each other."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.options import Options
from protos import inference_pb2, step_pb2
from runtime.version import octavo_version
from runtime.wire import PROTOCOL_VERSION

# Each rank has as much as its memory allows.
_OF_MEMORY = frozenset({"num_blocks", "max_model_len"})


class MembershipError(ValueError):
    """Ranks that can't work together; the message names what differs, and both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a scheduler asks of its ranks. model: empty takes whichever the first rank names. results_rank: the one that
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
    for field in inference_pb2.ModelInfo.DESCRIPTOR.fields:
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name not in may_differ and mine != theirs:
            raise MembershipError(f"{field.name} is {mine!r} at {whose} but {theirs!r} at {whose_other}")
