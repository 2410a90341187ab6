"""Which requests a core has to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.messages import GroupRequest

if TYPE_CHECKING:
    from tests.properties.world import World


def is_valid(world: World, request: GroupRequest) -> bool:
    """It can run, if it gets all there is. Its choices are in order."""
    settings, num_prompt_tokens = world.settings, len(request.prompt_token_ids)
    # The last token is sampled, but never computed.
    capacity = world.worker.num_blocks * settings.block_size + 1
    if num_prompt_tokens + request.stop.max_tokens > min(settings.max_model_len, capacity):
        return False
    return settings.enable_chunked_prefill or num_prompt_tokens <= settings.max_num_batched_tokens


def is_full(world: World, request: GroupRequest) -> bool:
    """The queue has no room for it: groups that have never run count, with their prompts."""
    settings = world.settings
    num_tokens = sum(world.queued.values()) + len(request.prompt_token_ids)
    return len(world.queued) >= settings.max_queued_requests or num_tokens > settings.max_queued_tokens
