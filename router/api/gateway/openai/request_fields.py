"""The table of a request's fields that dialects share: its JSON, and how each gets into the gRPC message.

A new field of this kind is one row: the schemas of all dialects are made of the table, and their converters follow it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from google.protobuf.json_format import ParseDict
from pydantic import AfterValidator, Field, create_model

from configs.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    PARAMETERS,
    Parameter,
)
from protos import inference_pb2 as pb
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.fields import Fields, at_most

# Dialects: OpenAI's chats and completions, with the tensors of KServe; its responses; Anthropic's messages.
CHATS, RESPONSES, MESSAGES = "chats", "responses", "messages"
_OFTEN, _ALWAYS = (CHATS, RESPONSES), (CHATS, RESPONSES, MESSAGES)
_SIDES = {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT}

Put = Callable[[pb.GenerateRequest, Any], None]


@dataclass(frozen=True, slots=True)
class RequestField:
    name: str
    # Its type for pydantic, and its default, which changes nothing in the message.
    kind: Any
    default: Any = None
    # Those that have it by this name.
    dialects: tuple[str, ...] = (CHATS,)
    # Puts a value that a client gave into the message. Raises BadRequestError. None: the message or its sampling
    # parameters have a field of this name and type.
    put: Put | None = None


def in_range(numbers: list[int], param: str) -> list[int]:
    """Checks that a uint32 can hold the numbers; the model's limits are checked later. Raises BadRequestError."""
    for number in numbers:
        if not 0 <= number < 2**32:
            raise BadRequestError(f"{param}: {number} is not from 0 to {2**32 - 1}", param=param)
    return numbers


class RepetitionDetection(Fields):
    max_pattern_size: int = Field(0, ge=0, lt=2**32)
    min_pattern_size: int = Field(0, ge=0, lt=2**32)
    min_count: int = Field(0, ge=0, lt=2**32)


def _by_name(name: str) -> Put:
    """Returns how a field gets into the one of its name."""
    is_sampled = name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    described = (pb.SamplingParams if is_sampled else pb.GenerateRequest).DESCRIPTOR.fields_by_name[name]
    is_list, is_number = described.is_repeated, described.cpp_type == described.CPPTYPE_UINT32

    def put(message: pb.GenerateRequest, value: Any) -> None:
        holder = message.sampling if is_sampled else message
        if isinstance(value, Fields):
            ParseDict(value.model_dump(), getattr(holder, name))
        elif is_list:
            getattr(holder, name).extend(in_range(value, name) if is_number else value)
        else:
            setattr(holder, name, value)

    return put


def _put_max_tokens(message: pb.GenerateRequest, value: int) -> None:
    # 0: the prompt alone is asked for. One token is computed, and the reply leaves it out.
    message.sampling.max_tokens = value or 1


def _put_allowed(message: pb.GenerateRequest, value: list[int]) -> None:
    if not value:
        raise BadRequestError("allowed_token_ids is empty: give at least one", param="allowed_token_ids")
    message.sampling.allowed_token_ids.extend(in_range(value, "allowed_token_ids"))


def _put_bias(message: pb.GenerateRequest, value: dict[int, float]) -> None:
    in_range(list(value), "logit_bias")
    message.sampling.logit_bias.update(value)


def _put_truncation(message: pb.GenerateRequest, value: int) -> None:
    if value == 0:
        raise BadRequestError(
            "truncate_prompt_tokens=0: use at least 1, or -1 for as many as fit", param="truncate_prompt_tokens"
        )
    message.truncate_prompt_tokens = max(value, 0)


def _put_session(message: pb.GenerateRequest, value: str) -> None:
    # Two fields name the conversation to which a request belongs; the first one counts.
    message.session_key = message.session_key or value


def _put_stop(message: pb.GenerateRequest, value: str | list[str]) -> None:
    message.sampling.stop.extend([value] if isinstance(value, str) else value)


def _put_seed(message: pb.GenerateRequest, value: int) -> None:
    # Negative seeds are the other half of the 64 bits.
    message.sampling.seed = value % 2**64


def _put_side(message: pb.GenerateRequest, value: str) -> None:
    message.truncation_side = _SIDES[value]


def _number(parameter: Parameter) -> RequestField:
    """Returns the field of a sampling parameter. The router checks its range later."""
    bounds: dict[str, Any] = {"ge": -(2**31), "lt": 2**31} if parameter.kind is int else {}
    kind, default = (parameter.kind | None, None) if parameter.from_model else (parameter.kind, parameter.default)
    dialects = _ALWAYS if parameter.name in ("temperature", "top_p", "top_k") else _OFTEN
    description = f"{parameter.doc} Use {parameter.what_works}."
    return RequestField(parameter.name, kind, Field(default, description=description, **bounds), dialects)


_COUNT: dict[str, Any] = {"ge": 0, "lt": 2**32}
# -1: no bound, as in vLLM.
_Budget = Annotated[int | None, Field(ge=-1, lt=2**32), AfterValidator(lambda count: None if count == -1 else count)]
_Bias = Annotated[dict[int, float], at_most(MAX_LOGIT_BIAS)]
_Stop = str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None


def _list(most: int, **default: Any) -> Any:
    """Returns the default of a list. default: nothing for None."""
    given: dict[str, Any] = default or {"default": None}
    return Field(**given, fail_fast=True, max_length=most)


FIELDS: tuple[RequestField, ...] = (
    *map(_number, PARAMETERS),
    RequestField("max_tokens", int | None, Field(None, **_COUNT), put=_put_max_tokens),
    RequestField("min_tokens", int, Field(0, **_COUNT)),
    RequestField("stop", _Stop, None, _OFTEN, _put_stop),
    RequestField("stop_token_ids", list[int], _list(MAX_STOP_TOKENS, default_factory=list), _OFTEN),
    RequestField("include_stop_str_in_output", bool, False),
    RequestField("ignore_eos", bool, False, _OFTEN),
    RequestField("seed", int | None, Field(None, ge=-(2**63), lt=2**64), _OFTEN, _put_seed),
    RequestField("logit_bias", _Bias, Field(default_factory=dict), put=_put_bias),
    RequestField("allowed_token_ids", list[int] | None, _list(MAX_ALLOWED_TOKENS), put=_put_allowed),
    RequestField("bad_words", list[str], _list(MAX_BAD_WORDS, default_factory=list)),
    RequestField("logprob_token_ids", list[int] | None, _list(MAX_LOGPROB_TOKENS)),
    RequestField("repetition_detection", RepetitionDetection | None),
    RequestField("thinking_token_budget", _Budget, None, _OFTEN),
    RequestField("skip_special_tokens", bool | None, None, _OFTEN),
    # Octavo's own: upper bound of the drafts of a choice in a step; 0: no speculation.
    RequestField("num_speculative_tokens", int | None, Field(None, **_COUNT), _ALWAYS),
    # Octavo's own: seconds for which a stream goes on without its reader.
    RequestField("detach_timeout", float | None, None, _ALWAYS),
    RequestField("priority", int, Field(0, ge=-(2**31), lt=2**31), _OFTEN),
    RequestField("cache_salt", str, "", _OFTEN),
    RequestField("session_key", str, "", _OFTEN, _put_session),
    RequestField("session_id", str, "", _OFTEN, _put_session),
    RequestField("add_special_tokens", bool | None),
    # -1: as many as leave room for max_tokens.
    RequestField("truncate_prompt_tokens", int | None, Field(None, ge=-1, lt=2**32), put=_put_truncation),
    RequestField("truncation_side", Literal["left", "right"] | None, put=_put_side),
)
_PUTS = tuple((each.name, each.put or _by_name(each.name)) for each in FIELDS)


def names_of(dialect: str) -> tuple[str, ...]:
    """Returns the names of a dialect's fields."""
    return tuple(each.name for each in FIELDS if dialect in each.dialects)


def schema_of(dialect: str, base: type[Fields] = Fields) -> Any:
    """Returns a class with a dialect's fields besides those of base."""
    fields: dict[str, Any] = {each.name: (each.kind, each.default) for each in FIELDS if dialect in each.dialects}
    return create_model("_Shared", __base__=base, **fields)


def put_fields(message: pb.GenerateRequest, request: Fields) -> None:
    """Puts the fields that a client gave into the message. Raises BadRequestError."""
    given = request.model_fields_set
    for name, put in _PUTS:
        if name in given and (value := getattr(request, name)) is not None:
            put(message, value)
