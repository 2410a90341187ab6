"""Checks a request for all that can be told without the model. Each error names the field, the value and what works."""

import re
from collections.abc import Iterator, Set

from protos.inference_pb2 import GenerateRequest
from router.errors import InvalidRequest
from router.parsing.parser import OutputFormat
from router.request import sampling
from router.request.chat import checks_of_chat
from router.request.features import (
    bans,
    beams,
    constraint,
    fill_in,
    items,
    logprobs,
    repetition,
    resume,
    stops,
    tools,
    truncation,
)
from router.request.values import shown

# Bytes of cache_salt, and of session_key.
MAX_KEY_BYTES = 256
# Seconds: bounds GenerateRequest.detach_timeout and the option.
LONGEST_DETACHED_S = 3600.0

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


# Features of the sampling parameters, in the order of their checks. One that no field asks for is not called.
_FEATURES = (repetition, logprobs, stops, bans, constraint)


def checks_of_request(message: GenerateRequest, given: Set[str], form: OutputFormat) -> Iterator[None]:
    """Does all checks, with pauses for an event loop. given: the fields of message.sampling that are set. form: of the
    served model's outputs. Raises InvalidRequest."""
    if message.request_id:
        check_request_id(message.request_id)
    for name in ("cache_salt", "session_key"):
        if (size := len(getattr(message, name).encode())) > MAX_KEY_BYTES:
            raise InvalidRequest(f"{name} has {size} bytes: at most {MAX_KEY_BYTES} are allowed")
    if message.HasField("detach_timeout"):
        check_detach_timeout(message)
    sampling.check(message.sampling)
    for feature in _FEATURES:
        if not feature.FIELDS.isdisjoint(given):
            feature.check(message)
    if message.HasField("resume"):
        resume.check(message)
    else:
        yield from _checks_of_input(message)
    if message.HasField("beam_search"):
        beams.check(message)
    # A resume brings its constraint.
    if message.chat.tools and not message.HasField("resume"):
        tools.check_size(message, form.calls)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id={shown(request_id)}: use 1 to 128 characters of [A-Za-z0-9._:-], or leave it empty"
        )


def check_detach_timeout(message: GenerateRequest) -> None:
    """Raises InvalidRequest."""
    if not 0 <= (seconds := message.detach_timeout) <= LONGEST_DETACHED_S:
        raise InvalidRequest(f"detach_timeout={seconds:g}: use seconds from 0 to {LONGEST_DETACHED_S:g}")


def _checks_of_input(message: GenerateRequest) -> Iterator[None]:
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("no input: set one of prompt, chat and token_ids")
    if message.items:
        items.check(message)
    if message.suffix:
        fill_in.check(message)
    if message.HasField("truncate_prompt_tokens"):
        truncation.check(message)
    if kind == "prompt":
        if not (message.prompt or message.suffix):
            raise InvalidRequest("prompt is empty: give at least one character")
    elif kind == "chat":
        yield from checks_of_chat(message.chat)
    elif not message.token_ids.ids:
        raise InvalidRequest("token_ids.ids is empty: give at least one token")
