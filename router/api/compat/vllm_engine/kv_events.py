"""Converts changes of the cluster's prefix cache to the events that SMG's router reads."""

from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from router.api.compat.kv_relay.relay import Batch
from router.api.compat.kv_relay.union import Block, Change

_MEDIUM = "GPU"
# Above the number of events in a batch, so that their ids are their own.
_MOST_EVENTS = 2**12


def event_batch(batch: Batch) -> common.KvEventBatch:
    """Converts a batch. A snapshot's first chunk begins with the end of all that was known."""
    message = common.KvEventBatch(sequence_number=batch.number, timestamp=batch.seconds, dp_rank=0)
    snapshot = batch.snapshot
    if snapshot is not None:
        message.snapshot.CopyFrom(
            common.KvSnapshotChunk(
                index=snapshot.index,
                count=snapshot.count,
                blocks=snapshot.blocks,
                unknown_before=snapshot.unknown_before,
            )
        )
        if snapshot.index == 0:
            message.events.add().cleared.SetInParent()
    for place, run in enumerate(_runs(batch.changes)):
        event = message.events.add()
        if snapshot is None:
            event.event_id = batch.number * _MOST_EVENTS % 2**64 + place
        if isinstance(run[0], Block):
            _store(event.stored, run)
        else:
            removed = event.removed
            removed.block_hashes.extend(map(_signed, run))
            removed.cache_level, removed.tier, removed.medium = 0, common.KV_CACHE_TIER_DEVICE, _MEDIUM
            removed.locality = common.KV_CACHE_LOCALITY_LOCAL
    return message


def _runs(changes: Sequence[Change]) -> Iterator[list[Any]]:
    """Yields neighbours that make one event: blocks that follow each other, or removals."""
    run: list[Any] = []
    for change in changes:
        if run and not _follows(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _follows(before: Change, change: Change) -> bool:
    if isinstance(change, Block):
        return isinstance(before, Block) and change.parent == before.block_hash
    return not isinstance(before, Block)


def _store(stored: common.KvBlocksStored, blocks: Sequence[Block]) -> None:
    first = blocks[0]
    if first.parent is not None:
        stored.parent_block_hash = _signed(first.parent)
    stored.tier, stored.medium = common.KV_CACHE_TIER_DEVICE, _MEDIUM
    stored.locality = common.KV_CACHE_LOCALITY_LOCAL
    for block in blocks:
        told = stored.blocks.add(
            block_hash=_signed(block.block_hash),
            token_ids=block.token_ids,
            block_size=len(block.token_ids),
            cache_level=0,
        )
        for key in block.extra_keys:
            if isinstance(key, str):
                # A salt is in the first block's hash; the others follow from it.
                told.extra_keys.add(text=key)
                stored.cache_salt = key
            else:
                identifier, offset = key
                told.extra_keys.add(multimodal=common.KvMultimodalKey(identifier=identifier, offset=offset))


def _signed(block_hash: int) -> int:
    """Returns the same 64 bits as a signed number."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
