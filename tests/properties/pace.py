"""Invariants of steps that should be short, and the times of steps in a walk."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from scheduler.core.messages import Plan, PlannedRow
from tests.properties import inside

if TYPE_CHECKING:
    from tests.properties.world import World


class StepTimes:
    """The times of steps on the virtual clock of a walk: a price a step, a token and a pair of tokens, and noise."""

    def __init__(self, choose: Random) -> None:
        self._choose = choose
        # Some walks are too slow for their target even without prefills.
        self._step, self._token = choose.choice([0.001, 0.005, 0.03]), choose.choice([0.0002, 0.001, 0.004])
        self._pair = choose.choice([0.0, 0.00005])
        self._noise = choose.choice([0.0, 0.0, 0.1, 0.5])

    def seconds(self, plan: Plan) -> float:
        num_in_chunks = plan.num_tokens - len(plan.decode_rows)
        seconds = self._step + self._token * plan.num_tokens + self._pair * num_in_chunks * plan.num_context_tokens
        return seconds * (1 + self._noise * self._choose.random())


def check_pace(world: World, plan: Plan) -> None:
    """Checks the prefills of a plan that the worker has not seen yet: not too many, and not too few."""
    settings = world.settings
    if not settings.inter_token_latency_target or not settings.enable_chunked_prefill:
        assert not plan.predicted_seconds, "a limit that was not asked for"
        return
    rows, prefills, num_tokens = world.worker.rows, plan.chunks, plan.num_prefill_tokens
    running = [sequence.row for sequence in world.by_generation.values() if sequence.row is not None]
    # The core learns only from the result that a row has failed.
    is_decoding = any(rows[row].has_sampled or rows[row].has_failed for row in running)
    is_late = plan.predicted_seconds * inside.margin(world.core) > _limit(world) * (1 + 1e-9)
    if is_decoding:
        # Drafts are priced in advance, and one item may take longer than all steps should.
        is_excused = num_tokens <= settings.least_prefill_tokens or plan.drafts or plan.encoded_items
        assert not is_late or is_excused, "a step will not end in time"
        world.seen["steps with a limit"] += plan.predicted_seconds > 0
        world.seen["steps too long for their prefills"] += is_late and num_tokens > 0
    elif not world.has_preempted:
        assert not plan.predicted_seconds, "a limit although nothing decodes"
    new = {planned.row: planned for planned in plan.new_rows}
    cut = [row for row, count in prefills if count < (_lacking(new[row]) if row in new else rows[row].num_lacking)]
    if cut and is_decoding and not plan.encoded_items and _is_simple(world):
        room = settings.max_num_batched_tokens - plan.num_tokens
        # The token of a decode that this prefill has preempted is left over.
        is_due = num_tokens < settings.least_prefill_tokens and room and not world.has_preempted
        assert not is_due, "a prefill gets less than its due"
        world.seen["prefills cut by the limit"] += room > 0
    if is_decoding and not prefills and _is_simple(world) and plan.num_tokens < settings.max_num_batched_tokens:
        waiting = [row for row in running if not rows[row].has_sampled and not rows[row].items]
        has_blocks = world.core.load.num_free_blocks >= settings.max_model_len // settings.block_size
        assert not waiting or not has_blocks or settings.num_stages > 1, "a prefill is left out"


def _lacking(planned: PlannedRow) -> int:
    return len(planned.token_ids) - planned.num_computed_tokens


def _limit(world: World) -> float:
    settings = world.settings
    return settings.inter_token_latency_target / (settings.max_steps_in_flight if settings.num_stages > 1 else 1)


def _is_simple(world: World) -> bool:
    """True if nothing but the budget and the limit bounds the chunks of this step."""
    settings = world.settings
    is_bounded = settings.max_num_partial_prefills > 1 or settings.long_prefill_token_threshold
    has_items = any(sequence.request.items for sequence in world.live.values())
    return not is_bounded and not has_items and not world.is_isolating
