"""Turns a resolved request into the core's: the one place that fills in a GroupRequest."""

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from protos import inference_pb2 as pb
from scheduler.core.messages import ChoiceStart, GroupRequest, ItemSpan, RepetitionRule, StopRules
from scheduler.ranks.step_wire import GroupSampling


class GroupFields(TypedDict, total=False):
    """Fields of a GroupRequest that pass through as they are."""

    priority: int
    cache_salt: str
    deadline: float | None
    tenant: str
    weight: float


def group_request(
    sampling: pb.SamplingParams,
    *,
    group: int,
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    choices: Sequence[ChoiceStart],
    items: Iterable[pb.ItemSpan] = (),
    **fields: Unpack[GroupFields],
) -> GroupRequest:
    """sampling: resolved, with every applicable field set; kept as long as the group lives. choices: at least one. The
    rest: as in GroupRequest."""
    return GroupRequest(
        group=group,
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        choices=tuple(choices),
        stop=_stop_rules(sampling),
        sampling=GroupSampling(sampling, group=group, first_choice=choices[0].choice),
        bypass_prefix_cache=sampling.HasField("prompt_logprobs"),
        is_constrained=is_constrained(sampling),
        max_drafts=sampling.num_speculative_tokens if sampling.HasField("num_speculative_tokens") else None,
        items=tuple(map(_item_span, items)),
        **fields,
    )


def is_constrained(sampling: pb.SamplingParams) -> bool:
    """True if the tokens that may come next depend on those before, beyond what workers know by themselves on a device:
    a constraint, or a budget of reasoning."""
    return sampling.HasField("constraint") or sampling.HasField("reasoning_marks")


def _stop_rules(sampling: pb.SamplingParams) -> StopRules:
    """The part of a group's sampling parameters that the core knows."""
    repetition = None
    if sampling.HasField("repetition_detection"):
        given = sampling.repetition_detection
        repetition = RepetitionRule(
            min_pattern_size=given.min_pattern_size,
            max_pattern_size=given.max_pattern_size,
            min_count=given.min_count,
        )
    return StopRules(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        repetition=repetition,
    )


def _item_span(item: pb.ItemSpan) -> ItemSpan:
    return ItemSpan(
        name=item.name,
        first_token=item.first_token,
        num_tokens=item.num_tokens,
        num_embeddings=item.num_embeddings,
        grid=tuple(item.grid),
        time_step=item.time_step,
    )
