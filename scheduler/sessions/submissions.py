"""Checks and assembles a router's submissions before they reach the step loop."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from configs.sampling import MAX_BAD_WORD_TOKENS, MAX_LOGPROB_TOKENS, MAX_PATTERN_SIZE, MOST_LOGPROBS, out_of_range
from protos import inference_pb2, scheduler_pb2
from runtime.media.names import NAME_BYTES
from runtime.telemetry.traceparent import valid_traceparent
from scheduler.core.messages import ChoiceStart
from scheduler.ranks.group_requests import group_request
from scheduler.sessions.commands import CancelGroup, Command, EndUnsentChoices, RefuseGroup, SubmitGroup
from scheduler.sessions.items import IncomingItems, ItemMemory, ProtocolError
from scheduler.sessions.sessions import MAX_ROUTER_GROUP, group_number

_INVALID = scheduler_pb2.REJECT_REASON_INVALID
_MAX_REQUEST_ID = 1024
# Columns hold choice numbers as int32, and each choice of a Submit becomes a sequence.
_MAX_CHOICE = 1023
# Far more than a prompt has.
_MOST_ITEMS = 4096
_KINDS = (inference_pb2.ITEM_KIND_IMAGE, inference_pb2.ITEM_KIND_VIDEO)
# Far beyond what an entry in a file of API keys may have.
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6


@dataclass(slots=True, kw_only=True)
class _Unsent:
    """A group whose prompt is still incomplete."""

    submit: scheduler_pb2.Submit
    choices: list[ChoiceStart]
    deadline: float | None
    prompt: "array[int]"


class Intake:
    """The router's side of one Session: assembles prompts sent in parts, and refuses invalid groups.

    For the gRPC thread. Incomplete prompts hold at most max_unsent_tokens in all, and are dropped with the Intake.
    """

    def __init__(
        self,
        session: int,
        model: inference_pb2.ModelInfo,
        *,
        max_unsent_tokens: int,
        item_memory: ItemMemory | None = None,
    ) -> None:
        """model: the model in the Session's Welcome. item_memory: None if no items are taken."""
        self._session, self._model = session, model
        self._items = None if item_memory is None else IncomingItems(item_memory)
        self._max_unsent_tokens = max_unsent_tokens
        self._unsent: dict[int, _Unsent] = {}
        self._num_unsent_tokens = 0
        self._last_group = 0

    def receive(self, message: scheduler_pb2.RouterMessage, now: float) -> list[Command]:
        """Turns a message into commands for the step loop. Raises ProtocolError."""
        match message.WhichOneof("message"):
            case "submit":
                return self._submit(message.submit, now)
            case "prompt_part":
                return self._add_part(message.prompt_part)
            case "cancel":
                return self._cancel(message.cancel)
            case "item_part":
                if self._items is None:
                    raise ProtocolError("item_part: no items are taken here")
                return list(self._items.add(message.item_part))
            case "open":
                raise ProtocolError("open: it must come first, and only once")
            case _:
                raise ProtocolError("message: its kind is not known here")

    def close(self) -> None:
        """Drops what is not complete, at the end of the Session."""
        if self._items is not None:
            self._items.close()

    def _submit(self, submit: scheduler_pb2.Submit, now: float) -> list[Command]:
        if submit.group <= self._last_group:
            raise ProtocolError(f"group: {submit.group} does not come after {self._last_group}; groups increase from 1")
        if submit.group > MAX_ROUTER_GROUP:
            raise ProtocolError(f"group: {submit.group} is beyond {MAX_ROUTER_GROUP}; open another Session")
        self._last_group = submit.group
        if objection := self._objection(submit):
            return [self._refuse(submit.group, objection)]
        deadline = now + submit.timeout if submit.timeout else None
        choices = [
            ChoiceStart(choice=start.choice, output_token_ids=tuple(start.output_token_ids)) for start in submit.choices
        ]
        if len(submit.prompt_token_ids) == submit.num_prompt_tokens:
            return [self._group(submit, choices, deadline, tuple(submit.prompt_token_ids))]
        if self._num_unsent_tokens + submit.num_prompt_tokens > self._max_unsent_tokens:
            message = (
                f"prompts of {self._num_unsent_tokens} tokens are being sent already and this one has "
                f"{submit.num_prompt_tokens}; max_queued_tokens={self._max_unsent_tokens}: try again later or elsewhere"
            )
            return [self._refuse(submit.group, message, scheduler_pb2.REJECT_REASON_QUEUE_FULL)]
        self._num_unsent_tokens += submit.num_prompt_tokens
        prompt = array("I", submit.prompt_token_ids)
        submit.ClearField("prompt_token_ids")
        self._unsent[submit.group] = _Unsent(submit=submit, choices=choices, deadline=deadline, prompt=prompt)
        return []

    def _add_part(self, part: scheduler_pb2.PromptPart) -> list[Command]:
        unsent = self._unsent.get(part.group)
        if unsent is None:
            return []  # refused or cancelled, and the router did not know yet
        declared = unsent.submit.num_prompt_tokens
        unsent.prompt.extend(part.prompt_token_ids)
        objection = self._unknown_token("prompt_token_ids", part.prompt_token_ids)
        if len(unsent.prompt) > declared:
            objection = f"num_prompt_tokens={declared}, but the parts hold {len(unsent.prompt)} tokens already"
        if objection:
            self._forget(part.group)
            return [self._refuse(part.group, objection)]
        if len(unsent.prompt) < declared:
            return []
        self._forget(part.group)
        return [self._group(unsent.submit, unsent.choices, unsent.deadline, tuple(unsent.prompt))]

    def _cancel(self, cancel: scheduler_pb2.CancelSequences) -> list[Command]:
        choices = tuple(cancel.choices)
        unsent = self._unsent.get(cancel.group)
        if unsent is None:
            return [
                CancelGroup(session=self._session, router_group=cancel.group, choices=choices, reason=cancel.reason)
            ]
        ended = tuple(start.choice for start in unsent.choices if not choices or start.choice in choices)
        unsent.choices = [start for start in unsent.choices if start.choice not in ended]
        if not unsent.choices:
            self._forget(cancel.group)
        return [EndUnsentChoices(session=self._session, router_group=cancel.group, choices=ended, reason=cancel.reason)]

    def _forget(self, group: int) -> None:
        self._num_unsent_tokens -= self._unsent.pop(group).submit.num_prompt_tokens

    def _group(
        self,
        submit: scheduler_pb2.Submit,
        choices: list[ChoiceStart],
        deadline: float | None,
        prompt: tuple[int, ...],
    ) -> SubmitGroup:
        # A copy: a reference into the Submit would keep all of it, prompt included, for as long as the group lives.
        sampling = inference_pb2.SamplingParams()
        sampling.CopyFrom(submit.sampling)
        request = group_request(
            sampling,
            group=group_number(self._session, submit.group),
            request_id=submit.request_id,
            prompt_token_ids=prompt,
            choices=choices,
            items=submit.items,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            deadline=deadline,
            tenant=submit.tenant,
            weight=submit.weight or 1.0,
        )
        return SubmitGroup(
            session=self._session,
            router_group=submit.group,
            attempt=submit.attempt,
            request=request,
            traceparent=valid_traceparent(submit.traceparent),
        )

    def _refuse(self, group: int, message: str, reason: scheduler_pb2.RejectReason = _INVALID) -> RefuseGroup:
        return RefuseGroup(session=self._session, router_group=group, reason=reason, message=message)

    def _objection(self, submit: scheduler_pb2.Submit) -> str | None:
        """The error in a Submit by itself, if any; the core checks it against its queues and blocks."""
        num_prompt_tokens, held = submit.num_prompt_tokens, len(submit.prompt_token_ids)
        max_model_len, sampling = self._model.max_model_len, submit.sampling
        if not num_prompt_tokens:
            return "the prompt is empty: give at least one token"
        # Refuses a prompt that is too long before the rest of it comes.
        if num_prompt_tokens >= max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len={max_model_len} holds prompt and output "
                f"together: give at most {max_model_len - 1}"
            )
        if held > num_prompt_tokens:
            return f"num_prompt_tokens={num_prompt_tokens}, but the message holds {held}"
        if not 1 <= len(submit.request_id) <= _MAX_REQUEST_ID:
            return f"request_id has {len(submit.request_id)} characters: 1 to {_MAX_REQUEST_ID} are valid"
        if not submit.choices:
            return "choices: give at least one"
        if (highest := max(start.choice for start in submit.choices)) > _MAX_CHOICE:
            return f"choices: {highest} is too large, the maximum is {_MAX_CHOICE}"
        if len(submit.choices) > _MAX_CHOICE + 1:
            return f"choices has {len(submit.choices)} entries: give each once"
        if not sampling.HasField("max_tokens"):
            return "sampling.max_tokens is not set: the router must set it, to at least 1"
        if not (math.isfinite(submit.timeout) and submit.timeout >= 0):
            return f"timeout={submit.timeout}: give seconds, or 0 for none"
        if len(submit.tenant) > _MAX_REQUEST_ID:
            return f"tenant has {len(submit.tenant)} characters: at most {_MAX_REQUEST_ID} are valid"
        if not (submit.weight == 0 or _LEAST_WEIGHT <= submit.weight <= _MOST_WEIGHT):
            return f"weight={submit.weight}: give {_LEAST_WEIGHT} to {_MOST_WEIGHT}, or 0 for 1"
        return (
            _why_not_sampled(sampling)
            or _wrong_items(submit)
            or self._unknown_token("prompt_token_ids", submit.prompt_token_ids)
            or self._unknown_token("sampling.stop_token_ids", sampling.stop_token_ids)
            or self._unknown_token("sampling.logit_bias", sampling.logit_bias)
            or self._unknown_token("sampling.allowed_token_ids", sampling.allowed_token_ids)
            or self._unknown_token("sampling.logprob_token_ids", sampling.logprob_token_ids)
            or self._bad_sequence(sampling.bad_word_token_ids)
            or next(filter(None, (self._unknown_token("choices", c.output_token_ids) for c in submit.choices)), None)
        )

    def _bad_sequence(self, sequences: Sequence[inference_pb2.TokenIds]) -> str | None:
        field = "sampling.bad_word_token_ids"
        for each in sequences:
            if not 1 <= len(each.ids) <= MAX_BAD_WORD_TOKENS:
                return f"{field} has a sequence of {len(each.ids)} tokens: 1 to {MAX_BAD_WORD_TOKENS} are valid"
            if objection := self._unknown_token(field, each.ids):
                return objection
        return None

    def _unknown_token(self, field: str, token_ids) -> str | None:  # a repeated field, or a map's keys
        highest, vocab_size = max(token_ids, default=0), self._model.vocab_size
        if highest >= vocab_size:
            return f"{field} holds token id {highest}, but vocab_size={vocab_size} ends at {vocab_size - 1}"
        return None


def _wrong_items(submit: scheduler_pb2.Submit) -> str | None:
    """The error in the items of a Submit, if any."""
    if len(submit.items) > _MOST_ITEMS:
        return f"items has {len(submit.items)} entries: give at most {_MOST_ITEMS}"
    end = 0
    for index, item in enumerate(submit.items):
        field = f"items[{index}]"
        if len(item.name) != NAME_BYTES:
            return f"{field}.name has {len(item.name)} bytes: it must have {NAME_BYTES}"
        if item.kind not in _KINDS:
            return f"{field}.kind is {item.kind}: it must be an image or a video"
        if not 1 <= item.num_embeddings <= item.num_tokens:
            return f"{field}.num_embeddings={item.num_embeddings}: give 1 to num_tokens, which is {item.num_tokens}"
        if item.first_token < end:
            return f"{field}.first_token={item.first_token}: the item before it ends at {end}"
        end = item.first_token + item.num_tokens
        if end > submit.num_prompt_tokens:
            return f"{field} ends at token {end}, but the prompt has {submit.num_prompt_tokens} tokens"
        if len(item.grid) not in (0, 3) or not all(item.grid) or math.prod(item.grid) > item.num_tokens:
            return f"{field}.grid is {list(item.grid)}: give three numbers whose product is at most num_tokens, or none"
        if not (math.isfinite(item.time_step) and item.time_step >= 0):
            return f"{field}.time_step={item.time_step}: give 0 or more"
    return None


def _why_not_sampled(sampling: inference_pb2.SamplingParams) -> str | None:
    """The sampling parameter that would make a worker fail, and all its sequences with it. Routers check more."""
    repetition = sampling.repetition_detection
    if sampling.HasField("repetition_detection") and not (
        1 <= repetition.min_pattern_size <= repetition.max_pattern_size <= MAX_PATTERN_SIZE and repetition.min_count > 1
    ):
        return (
            f"sampling.repetition_detection has patterns of {repetition.min_pattern_size} to "
            f"{repetition.max_pattern_size} tokens and min_count={repetition.min_count}: 1 to {MAX_PATTERN_SIZE}, and "
            "at least 2, are valid"
        )
    listed = sampling.logprob_token_ids
    if listed and not len(set(listed)) == len(listed) == sampling.logprobs <= MAX_LOGPROB_TOKENS:
        return (
            f"sampling.logprob_token_ids has {len(listed)} entries: give sampling.logprobs distinct ones, up to "
            f"{MAX_LOGPROB_TOKENS}"
        )
    for name in ("prompt_logprobs",) if listed else ("logprobs", "prompt_logprobs"):
        if (count := getattr(sampling, name)) > MOST_LOGPROBS:
            return f"sampling.{name}={count}: give at most {MOST_LOGPROBS}"
    if (wrong := out_of_range(sampling)) is not None:
        parameter, value = wrong
        return f"sampling.{parameter.name}={value}: give {parameter.what_works}"
    if not all(map(math.isfinite, sampling.logit_bias.values())):
        return "sampling.logit_bias holds a number that is not finite"
    return None
