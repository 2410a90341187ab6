"""The requests that a core must accept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from scheduler.core.messages import GroupRequest
from tests.properties.model import age_of

if TYPE_CHECKING:
    from tests.properties.world import World


def is_valid(world: World, request: GroupRequest) -> bool:
    """Returns True if the request could run with all blocks to itself."""
    settings, num_prompt_tokens = world.settings, len(request.prompt_token_ids)
    # The last token is sampled, but never computed.
    capacity = world.worker.num_blocks * settings.block_size + 1
    if num_prompt_tokens + request.stop.max_tokens > min(settings.max_model_len, capacity):
        return False
    sizes = {span.name: span.num_embeddings for span in request.items}.values()
    # Without chunked prefill, all are encoded in one step.
    at_once = max(sizes, default=0) if settings.enable_chunked_prefill else sum(sizes)
    if at_once > settings.encoder_cache_size:
        return False
    return settings.enable_chunked_prefill or num_prompt_tokens <= settings.max_num_batched_tokens


def is_full(world: World, request: GroupRequest) -> bool:
    """Returns True if the queue has no room for the request. It holds groups that have never run, and their prompts."""
    return _is_full(world, list(world.queued.values()), request)


def _is_full(world: World, queued: list[GroupRequest], request: GroupRequest) -> bool:
    """queued: the groups in the queue."""
    settings, num_tokens = world.settings, len(request.prompt_token_ids)
    free = settings.max_queued_requests - len(queued)
    free_tokens = settings.max_queued_tokens - _num_tokens(queued)
    if free < 1 or num_tokens > free_tokens:
        return True
    own = [each for each in queued if each.tenant == request.tenant]
    if not request.tenant or not own:
        return False
    # A tenant gets as much as is free, times its weight.
    weight = request.weight
    return len(own) + 1 > weight * free or _num_tokens(own) + num_tokens > weight * free_tokens


def has_used_up_its_share(world: World, tenant: str, weight: float) -> bool:
    """True if a tenant that waits already could not get another place, or one more token."""
    settings, queued = world.settings, list(world.queued.values())
    own = [each for each in queued if each.tenant == tenant]
    return any(
        size < total + 1 or used + 1 > weight * (size - total)
        for size, total, used in (
            (settings.max_queued_requests, len(queued), len(own)),
            (settings.max_queued_tokens, _num_tokens(queued), _num_tokens(own)),
        )
    )


def _num_tokens(requests: Iterable[GroupRequest]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)


def making_way(world: World, request: GroupRequest) -> list[int]:
    """The tenant's groups that must leave a full queue to make room for the request: of lower priority, without any
    output yet, last in order first, and no more than necessary."""
    settings = world.settings
    if settings.scheduling_policy != "priority":
        return []
    waiting = {
        sequence.request.group: sequence.order[:2]
        for sequence in world.live.values()
        if sequence.request.group in world.queued
        and sequence.tenant == request.tenant
        and sequence.order[0] > request.priority + age_of(settings, world.now)
        and not any(start.output_token_ids for start in sequence.request.choices)
    }
    left = dict(world.queued)
    gone = []
    for group in sorted(waiting, key=lambda group: waiting[group], reverse=True):
        del left[group]
        gone.append(group)
        if not _is_full(world, list(left.values()), request):
            return gone
    return []
