"""Invariants of the items of requests, between a core and its worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.messages import FinishReason, Plan, SequenceEnd
from tests.properties import inside
from tests.properties.model import ModelSequence

if TYPE_CHECKING:
    from tests.properties.world import World


def take_wanted(world: World) -> None:
    """Passes the items that the core wants on to the worker, after the plans made so far."""
    for item in world.core.take_wanted_items():
        world.worker.receive(item)
        world.unanswered.add(item.number)
        world.seen["items: wanted"] += 1


def answer_item(
    world: World, number: int, *, failing: bool
) -> tuple[list[SequenceEnd], list[tuple[ModelSequence, FinishReason]]]:
    """Answers for the worker. Returns the ends that come of it, and those that must."""
    world.unanswered.remove(number)
    needing = [sequence for sequence in world.live.values() if _needs(world, sequence, number)]
    if not failing:
        world.worker.prepare(number)
        world.core.item_prepared(number)
        world.core.item_prepared(number)
        return [], []
    assert not needing or world.core.wants_item(number), "a sequence needs it"
    world.worker.fail(number)
    ends = world.core.item_failed(number, "it can't be decoded", world.now)
    for end in ends:
        group = end.key[0]
        has_begun = group not in world.queued or any(start.output_token_ids for start in world.queued[group].choices)
        assert end.is_invalid != has_begun, "refused, although it has begun, or the other way round"
    world.seen["items: failed"] += len(ends)
    return ends, [(sequence, FinishReason.ERROR) for sequence in needing]


def _needs(world: World, sequence: ModelSequence, number: int) -> bool:
    """True if tokens of the item are still to be computed."""
    item = world.worker.inputs[number]
    ends = [
        span.end
        for span in sequence.request.items
        if (span.name, span.num_embeddings) == (item.name, item.num_embeddings)
    ]
    num_computed = 0 if sequence.row is None else world.worker.rows[sequence.row].num_computed_tokens
    return any(end > num_computed for end in ends)


def may_lack_items(world: World, sequence: ModelSequence, plan: Plan) -> bool:
    """True if others may go before a waiting sequence: an item is neither prepared nor in the cache, or leaves it with
    this plan."""
    worker = world.worker
    there = {worker.inputs[number].name for number in worker.prepared}
    there |= {item.name for number, item in worker.embeddings.items() if number not in plan.dropped_items}
    return any(span.name not in there for span in sequence.request.items)


def check_encoded(world: World, plan: Plan) -> None:
    """Checks what a plan encodes, before the worker has seen it."""
    settings, sizes = world.settings, [world.worker.inputs[number].num_embeddings for number in plan.encoded_items]
    if settings.enable_chunked_prefill:
        budget = settings.max_num_encoder_input_tokens
        assert sum(sizes) <= budget or len(sizes) == 1, "a step encodes more than it may"
        world.seen["items: one beyond the budget"] += sum(sizes) > budget
    seen = world.seen
    seen["items: encoded"] += len(sizes)
    seen["items: dropped"] += len(plan.dropped_items)
    seen["items: forgotten"] += len(plan.forgotten_items)
    rows = {planned.row: planned for planned in plan.new_rows}
    for planned in plan.new_rows:
        found = planned.num_computed_tokens
        seen["items: a hit that covers one"] += any(span.end <= found for _, span in planned.items)
        seen["items: a hit that ends inside one"] += any(
            span.first_token < found < span.end for _, span in planned.items
        )
        seen["items: a hit that ends before one"] += any(0 < found <= span.first_token for _, span in planned.items)
    for row, count in plan.chunks:
        if row in rows:
            start, items = rows[row].num_computed_tokens, rows[row].items
        else:
            start, items = world.worker.rows[row].num_computed_tokens, world.worker.rows[row].items
        seen["items: a chunk that ends inside one"] += any(
            span.first_token < start + count < span.end for _, span in items
        )
        seen["items: a chunk that ends before one"] += any(span.first_token == start + count for _, span in items)
        touched = {number for number, span in items if span.first_token < start + count and start < span.end}
        seen["items: found in the cache"] += len(touched - set(plan.encoded_items))


def check_items(world: World) -> None:
    """Right after a plan the worker has the embeddings and inputs that the core thinks it has."""
    embeddings, inputs = inside.items(world.core)
    assert world.worker.embeddings.keys() == embeddings, "not the embeddings that the core thinks are there"
    assert world.worker.inputs.keys() == inputs, "not the inputs that the core thinks are there"
