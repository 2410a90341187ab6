"""The requests that a core must accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.messages import GroupRequest

if TYPE_CHECKING:
    from tests.properties.world import World


def is_valid(world: World, request: GroupRequest) -> bool:
    """Returns True if the request could run with all blocks to itself."""
    settings, num_prompt_tokens = world.settings, len(request.prompt_token_ids)
    # The last token is sampled, but never computed.
    capacity = world.worker.num_blocks * settings.block_size + 1
    if num_prompt_tokens + request.stop.max_tokens > min(settings.max_model_len, capacity):
        return False
    return settings.enable_chunked_prefill or num_prompt_tokens <= settings.max_num_batched_tokens


def is_full(world: World, request: GroupRequest) -> bool:
    """Returns True if the queue has no room for the request. It holds groups that have never run, and their prompts."""
    settings = world.settings
    num_tokens = sum(world.queued.values()) + len(request.prompt_token_ids)
    return len(world.queued) >= settings.max_queued_requests or num_tokens > settings.max_queued_tokens


def making_way(world: World, request: GroupRequest) -> list[int]:
    """The groups that must leave a full queue to make room for the request: of lower priority, without any output yet,
    last in order first, and no more than necessary."""
    settings = world.settings
    if settings.scheduling_policy != "priority":
        return []
    waiting = {
        sequence.request.group: sequence.order[:2]
        for sequence in world.live.values()
        if sequence.request.group in world.queued
        and sequence.request.priority > request.priority
        and not any(start.output_token_ids for start in sequence.request.choices)
    }
    left = dict(world.queued)
    num_prompt_tokens = len(request.prompt_token_ids)
    gone = []
    for group in sorted(waiting, key=lambda group: waiting[group], reverse=True):
        del left[group]
        gone.append(group)
        has_room = len(left) < settings.max_queued_requests
        if has_room and sum(left.values()) + num_prompt_tokens <= settings.max_queued_tokens:
            return gone
    return []
