"""The table of sampling fields that the engines' requests share, and what becomes of each in Octavo's own.

KServe's requests have theirs as JSON, by the table of the HTTP dialects (router/api/gateway/openai/request_fields.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from configs.sampling import ALL_LOGPROBS, BY_NAME
from protos import inference_pb2 as pb
from router.errors import InvalidRequest

# Puts a value; the text names the engine's field, for errors. Raises InvalidRequest.
_Put = Callable[[pb.SamplingParams, Any, str], None]
# The field is signed in Octavo's message.
_MOST_TOP_K = BY_NAME["top_k"].high


def _same(name: str) -> _Put:
    def put(sampling: pb.SamplingParams, value: Any, field: str) -> None:
        if pb.SamplingParams.DESCRIPTOR.fields_by_name[name].is_repeated:
            getattr(sampling, name).extend(value)
        else:
            setattr(sampling, name, value)

    return put


def _logprobs(name: str) -> _Put:
    def put(sampling: pb.SamplingParams, value: int, field: str) -> None:
        if value < -1:
            raise InvalidRequest(f"{field}={value}: use -1 for all tokens, or 0 and above")
        setattr(sampling, name, ALL_LOGPROBS if value == -1 else value)

    return put


def _constraint(kind: str) -> _Put:
    def put(sampling: pb.SamplingParams, value: Any, field: str) -> None:
        if value is False:
            raise InvalidRequest(f"{field}=false: use true, or leave it unset")
        setattr(sampling.constraint, kind, value)

    return put


def _put_choice(sampling: pb.SamplingParams, value: Any, field: str) -> None:
    sampling.constraint.choice.texts.extend(value.choices)
    sampling.constraint.choice.SetInParent()


def _put_top_k(sampling: pb.SamplingParams, value: int, field: str) -> None:
    if not -1 <= value <= _MOST_TOP_K:
        raise InvalidRequest(f"{field}={value}: use at most {_MOST_TOP_K}, or 0 for off")
    sampling.top_k = max(value, 0)


def _put_seed(sampling: pb.SamplingParams, value: int, field: str) -> None:
    # Negative seeds are the other half of the 64 bits.
    sampling.seed = value % 2**64


def _put_bias(sampling: pb.SamplingParams, value: Mapping[Any, float], field: str) -> None:
    for token_id, bias in value.items():
        shown = str(token_id)
        if not (shown.isascii() and shown.isdecimal() and int(shown) < 2**32):
            raise InvalidRequest(f"{field}[{token_id!r:.40}]: use a token id, 0 or above")
        sampling.logit_bias[int(shown)] = bias


_KINDS = ("json_schema", "regex", "grammar", "structural_tag", "json_object")
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")
_COUNTS, _FLAGS = ("n", "min_tokens", "max_tokens"), ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
# By the names in Octavo's message.
_PUTS: dict[str, _Put] = {
    **{name: _same(name) for name in (*BY_NAME, *_COUNTS, *_FLAGS, *_LISTS)},
    **{kind: _constraint(kind) for kind in _KINDS},
    **{name: _logprobs(name) for name in ("logprobs", "prompt_logprobs")},
    "choice": _put_choice,
    "top_k": _put_top_k,
    "seed": _put_seed,
    "logit_bias": _put_bias,
}
# The engines' defaults, which 0 means in fields that can't be left unset and where 0 is no value.
_ZEROS = {"max_tokens": 20, "top_p": 1.0, "repetition_penalty": 1.0}


def sampling_of(
    given: Mapping[str, Message], names: Mapping[str, str] | None = None, *, fills: bool = False
) -> pb.SamplingParams:
    """Converts the fields that the table has. Raises InvalidRequest.

    given: the messages that have them, by their names in the request. names: Octavo's name of each field that the
    engine names otherwise. fills: parameters that are unset get their defaults, not the model's.
    """
    sampling, renamed = pb.SamplingParams(), names or {}
    for place, message in given.items():
        for field in message.DESCRIPTOR.fields:
            name = renamed.get(field.name, field.name)
            if name not in _PUTS:
                continue
            value = getattr(message, field.name)
            if field.has_presence:
                if not message.HasField(field.name):
                    if not fills or name not in BY_NAME:
                        continue
                    value = BY_NAME[name].default
            elif not value:
                value = _ZEROS.get(name, value)
            _PUTS[name](sampling, value, f"{place}.{field.name}")
    return sampling


def refuse(request: Message, reasons: Mapping[str, str], place: str = "") -> None:
    """Refuses fields that hold anything but 0. reasons: by the field's name. Raises InvalidRequest."""
    for field, value in request.ListFields():
        if field.name in reasons and value != 0:
            shown = f"={value}" if isinstance(value, int) and not isinstance(value, bool) else " is set"
            raise InvalidRequest(f"{place}{field.name}{shown}: {reasons[field.name]}; leave it unset")
