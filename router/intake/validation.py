"""Checks what a client sent, and fills in the sampling parameters it left open.

Every message names the field, the value seen and what would work.
"""

import os
import re
from collections.abc import Iterator, Sequence

from configs.sampling import (
    ALL_LOGPROBS,
    FROM_MODEL,
    LARGEST_LOGIT_BIAS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKENS,
    MAX_PATTERN_SIZE,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    out_of_range,
)
from protos.inference_pb2 import (
    TRUNCATION_SIDE_RIGHT,
    ChatPrompt,
    GenerateRequest,
    ModelInfo,
    RepetitionDetection,
    Resume,
    SamplingParams,
)
from router.errors import InvalidRequest, UnknownModel
from router.intake.media.asked import check_parts
from router.intake.tools import MAX_TOOLS_BYTES, check_calls, check_tools
from router.text.request_templates import MAX_TEMPLATE_CHARS


def pick_seed() -> int:
    """A random seed of 63 bits: languages without unsigned 64-bit integers can hold it."""
    return int.from_bytes(os.urandom(8)) >> 1


def resolve_sampling(
    requested: SamplingParams, model_default: SamplingParams, *, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Returns a copy with every applicable field filled in, so that a resume leaves nothing to a default.

    requested: validated (router.intake.validation). num_prompt_tokens: below max_model_len.
    """
    resolved = SamplingParams()
    resolved.CopyFrom(requested)
    for parameter in FROM_MODEL:
        if not parameter.given_in(resolved):
            setattr(resolved, parameter.name, parameter.value_in(model_default))
    resolved.top_k = max(resolved.top_k, 0)
    resolved.n = resolved.n or 1
    if not resolved.HasField("seed"):
        resolved.seed = pick_seed()
    if not resolved.HasField("max_tokens"):
        resolved.max_tokens = max_model_len - num_prompt_tokens
    if resolved.repetition_detection.max_pattern_size:
        resolved.repetition_detection.min_pattern_size = max(resolved.repetition_detection.min_pattern_size, 1)
    else:
        resolved.ClearField("repetition_detection")
    if listed := list(dict.fromkeys(resolved.logprob_token_ids)):
        resolved.logprob_token_ids[:] = listed
        resolved.logprobs = len(listed)
    if not resolved.HasField("skip_special_tokens"):
        resolved.skip_special_tokens = True
    return resolved


def truncation(num_tokens: int, request: GenerateRequest, max_model_len: int) -> tuple[int, int]:
    """Returns where the tokens of a prompt begin and end that truncate_prompt_tokens keeps."""
    most = request.truncate_prompt_tokens
    if not most:
        reserved = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 1
        most = max(max_model_len - reserved, 1)
    if num_tokens <= most:
        return 0, num_tokens
    return (0, most) if request.truncation_side == TRUNCATION_SIDE_RIGHT else (num_tokens - most, num_tokens)


def resolve_logprobs(resolved: SamplingParams, vocab_size: int, max_logprobs: int) -> int:
    """Puts numbers in the place of ALL_LOGPROBS. Returns the most logprobs that a replica must be able to return beside
    a token. max_logprobs: that of the replica that has most. Raises InvalidRequest."""
    most = 0
    for name in ("prompt_logprobs",) if resolved.logprob_token_ids else ("logprobs", "prompt_logprobs"):
        count = getattr(resolved, name)
        if count == ALL_LOGPROBS:
            if vocab_size > max_logprobs:
                raise InvalidRequest(
                    f"sampling.{name}=-1 asks for all {vocab_size} tokens: max_logprobs={max_logprobs} allows 0 to "
                    f"{max_logprobs}"
                )
            count = vocab_size
            setattr(resolved, name, count)
        if count > max_logprobs:
            raise InvalidRequest(f"sampling.{name}={count}: use 0 to {max_logprobs}, the option max_logprobs")
        most = max(most, count)
    return most


MAX_CHAT_MESSAGES = 16_384
# Bytes that a template gets besides the messages' text: mostly definitions of tools.
MAX_TEMPLATE_ARGUMENTS_BYTES = 2**20
# Tokens of one Tokenize or Detokenize; more than any model's output.
MAX_TOKENIZED = 2**20
# Bytes of cache_salt, and of session_key.
MAX_KEY_BYTES = 256
# Submit.attempt holds 16 bits of it; see router.replicas.dispatcher.
MAX_ATTEMPT = 2**16 - 1

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def check_model_name(name: str, served: str) -> None:
    """Raises UnknownModel."""
    if name and name != served:
        raise UnknownModel(f"model={_shown(name)} is not served here: use {served!r}, or leave it empty")


# Messages of a chat, of which each may have a thousand parts, are checked one after the other; this many take 1 ms.
_MESSAGES_AT_ONCE = 256


def check_request(request: GenerateRequest) -> None:
    """Checks all that can be checked without the model. Raises InvalidRequest."""
    for _ in checks_of_request(request):
        pass


def checks_of_request(request: GenerateRequest) -> Iterator[None]:
    """Does what check_request does, with pauses for an event loop. Raises InvalidRequest."""
    if request.request_id:
        check_request_id(request.request_id)
    for name in ("cache_salt", "session_key"):
        if (size := len(getattr(request, name).encode())) > MAX_KEY_BYTES:
            raise InvalidRequest(f"{name} has {size} bytes: at most {MAX_KEY_BYTES} are allowed")
    check_sampling(request.sampling)
    if request.HasField("resume"):
        _check_resume(request.resume, request.sampling)
    else:
        yield from _checks_of_input(request)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id={_shown(request_id)}: use 1 to 128 characters of [A-Za-z0-9._:-], or leave it empty"
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidRequest."""
    if (wrong := out_of_range(sampling)) is not None:
        parameter, value = wrong
        shown = f"{value:g}" if parameter.kind is float else value
        raise InvalidRequest(f"sampling.{parameter.name}={shown}: use {parameter.what_works}")
    if sampling.n > MAX_CHOICES:
        raise InvalidRequest(f"sampling.n={sampling.n}: use 1 to {MAX_CHOICES}")
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens=0: use at least 1, or leave it unset")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"sampling.min_tokens={sampling.min_tokens}: use at most max_tokens, which is {sampling.max_tokens}"
        )
    _check_repetition(sampling.repetition_detection)
    listed = sampling.logprob_token_ids
    if len(listed) > MAX_LOGPROB_TOKENS:
        raise InvalidRequest(f"sampling.logprob_token_ids has {len(listed)} entries: use at most {MAX_LOGPROB_TOKENS}")
    if listed and sampling.HasField("logprobs") and sampling.logprobs != len(set(listed)):
        raise InvalidRequest(
            f"sampling.logprobs={sampling.logprobs}: leave it unset, because logprob_token_ids says which ones"
        )
    _check_stops(sampling)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"sampling.logit_bias has {len(sampling.logit_bias)} entries: use at most {MAX_LOGIT_BIAS}"
        )
    for token_id, bias in sampling.logit_bias.items():
        if not abs(bias) <= LARGEST_LOGIT_BIAS:
            raise InvalidRequest(
                f"sampling.logit_bias[{token_id}]={bias:g}: use a number in "
                f"[-{LARGEST_LOGIT_BIAS}, {LARGEST_LOGIT_BIAS}]"
            )


def check_chat(chat: ChatPrompt) -> None:
    """Raises InvalidRequest."""
    for _ in checks_of_chat(chat):
        pass


def checks_of_chat(chat: ChatPrompt) -> Iterator[None]:
    """Does what check_chat does, with pauses for an event loop. Raises InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty: give at least one message")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequest(f"chat.messages has {len(chat.messages)} entries: use at most {MAX_CHAT_MESSAGES}")
    if chat.template_arguments_json and chat.HasField("template_arguments"):
        raise InvalidRequest("chat has template_arguments and template_arguments_json: send one of them")
    sizes = {
        "template_arguments": chat.template_arguments.ByteSize(),
        "template_arguments_json": len(chat.template_arguments_json.encode()),
    }
    for name, size in sizes.items():
        if size > MAX_TEMPLATE_ARGUMENTS_BYTES:
            raise InvalidRequest(f"chat.{name} has {size} bytes: at most {MAX_TEMPLATE_ARGUMENTS_BYTES} are allowed")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("chat.continue_final_message is set, and add_generation_prompt, too: use one of them")
    check_tools(chat)
    num_bytes: dict[str, int] = {"fields_json": 0, "tool_calls": 0}
    for i, message in enumerate(chat.messages):
        field = f"chat.messages[{i}]"
        if not message.role:
            raise InvalidRequest(f"{field}.role is empty: use a role of the model's template, such as 'user'")
        check_parts(message, field)
        num_bytes["fields_json"] += len(message.fields_json.encode())
        num_bytes["tool_calls"] += check_calls(message, field)
        if len(message.parts) + i % _MESSAGES_AT_ONCE >= _MESSAGES_AT_ONCE - 1:
            yield
    for name, most in (("fields_json", MAX_TEMPLATE_ARGUMENTS_BYTES), ("tool_calls", MAX_TOOLS_BYTES)):
        if num_bytes[name] > most:
            raise InvalidRequest(f"chat.messages have {num_bytes[name]} bytes of {name}: at most {most} are allowed")


def check_chat_template(source: str, *, is_trusted: bool) -> None:
    """Raises InvalidRequest. is_trusted: option trust_request_chat_template."""
    if source and not is_trusted:
        raise InvalidRequest(
            f"chat.chat_template has {len(source)} characters, but this router renders only the model's own template: "
            "leave it out, or start the router with trust_request_chat_template"
        )
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(f"chat.chat_template has {len(source)} characters: use at most {MAX_TEMPLATE_CHARS}")


def check_text_length(text: str, longest_token: int, max_model_len: int) -> None:
    """Refuses a text that is too long however it is tokenized. longest_token: its characters. Raises InvalidRequest."""
    _check_length(len(text), longest_token, max_model_len)


def _check_length(num_chars: int, longest_token: int, max_model_len: int) -> None:
    if num_chars > max_model_len * longest_token:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters: "
            f"more than max_model_len={max_model_len} tokens however it is tokenized; shorten it"
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    if token_ids and max(token_ids) >= vocab_size:
        position, token_id = next((i, token_id) for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequest(f"{field}[{position}]={token_id}: token ids of this model are 0 to {vocab_size - 1}")


def check_chat_length(chat: ChatPrompt, longest_token: int, max_model_len: int) -> None:
    """Does what check_text_length does, for all messages together. Raises InvalidRequest."""
    num_chars = sum(
        len(message.content) + len(message.reasoning) + sum(len(part.text) for part in message.parts)
        for message in chat.messages
    )
    _check_length(num_chars, longest_token, max_model_len)


def check_detokenized(token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest."""
    if len(token_ids) > MAX_TOKENIZED:
        raise InvalidRequest(f"token_ids has {len(token_ids)} entries: use at most {MAX_TOKENIZED}")


def check_prompt_length(num_prompt_tokens: int, model: ModelInfo) -> None:
    """Raises InvalidRequest."""
    if not num_prompt_tokens:
        raise InvalidRequest("the prompt is empty: give at least one token")
    if num_prompt_tokens >= model.max_model_len:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens: use at most {model.max_model_len - 1}, so that with one "
            f"output token it fits max_model_len={model.max_model_len}"
        )


def check_against_model(prompt_token_ids: Sequence[int], sampling: SamplingParams, model: ModelInfo) -> None:
    """Checks what depends on the model and the prompt's length. sampling: as requested. Raises InvalidRequest."""
    num_prompt_tokens = len(prompt_token_ids)
    check_prompt_length(num_prompt_tokens, model)
    room = model.max_model_len - num_prompt_tokens
    if sampling.HasField("max_tokens") and sampling.max_tokens > room:
        raise InvalidRequest(
            f"sampling.max_tokens={sampling.max_tokens} after a prompt of {num_prompt_tokens} tokens goes beyond "
            f"max_model_len={model.max_model_len}: use at most {room}, or leave it unset"
        )
    if sampling.min_tokens > room:
        raise InvalidRequest(
            f"sampling.min_tokens={sampling.min_tokens}: this prompt leaves room for {room}; use at most that"
        )
    check_token_ids("token_ids.ids", prompt_token_ids, model.vocab_size)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    check_token_ids("sampling.logit_bias", list(sampling.logit_bias), model.vocab_size)
    check_token_ids("sampling.logprob_token_ids", sampling.logprob_token_ids, model.vocab_size)


def _check_stops(sampling: SamplingParams) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"sampling.stop has {len(sampling.stop)} entries: use at most {MAX_STOP_STRINGS}")
    for i, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"sampling.stop[{i}] has {len(stop)} characters: use 1 to {MAX_STOP_CHARS}")
    check_stop_tokens(sampling)


def check_stop_tokens(sampling: SamplingParams) -> None:
    """Raises InvalidRequest."""
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"sampling.stop_token_ids has {len(sampling.stop_token_ids)} entries: use at most {MAX_STOP_TOKENS}"
        )


def _check_repetition(detection: RepetitionDetection) -> None:
    longest, shortest, count = detection.max_pattern_size, detection.min_pattern_size, detection.min_count
    field = "sampling.repetition_detection"
    if longest > MAX_PATTERN_SIZE:
        raise InvalidRequest(f"{field}.max_pattern_size={longest}: use at most {MAX_PATTERN_SIZE}, or 0 for off")
    if shortest > longest:
        raise InvalidRequest(f"{field}.min_pattern_size={shortest}: use at most max_pattern_size, which is {longest}")
    if longest and count < 2:
        raise InvalidRequest(f"{field}.min_count={count}: use at least 2")


def _checks_of_input(request: GenerateRequest) -> Iterator[None]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("no input: set one of prompt, chat and token_ids")
    if request.items and (kind == "chat" or request.suffix):
        where = "a chat has its items in parts of its messages" if kind == "chat" else "suffix is set, too"
        raise InvalidRequest(f"items has {len(request.items)} entries, and {where}: leave them out")
    if request.suffix:
        _check_suffix(request)
    elif kind == "prompt" and not request.prompt:
        raise InvalidRequest("prompt is empty: give at least one character")
    if kind == "chat":
        yield from checks_of_chat(request.chat)
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidRequest("token_ids.ids is empty: give at least one token")


def _check_suffix(request: GenerateRequest) -> None:
    size = f"suffix has {len(request.suffix)} characters"
    if request.WhichOneof("input") != "prompt":
        raise InvalidRequest(f"{size}: it needs prompt as text")
    if request.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(f"{size}, and truncate_prompt_tokens is set: use one of them")


def _check_resume(resume: Resume, sampling: SamplingParams) -> None:
    if not 1 <= resume.attempt <= MAX_ATTEMPT:
        raise InvalidRequest(f"resume.attempt={resume.attempt}: use Started.attempt + 1, at most {MAX_ATTEMPT}")
    if not resume.prompt_token_ids:
        raise InvalidRequest("resume.prompt_token_ids is empty: give Started.prompt_token_ids")
    for name in ("seed", "max_tokens"):
        if not sampling.HasField(name):
            raise InvalidRequest(f"sampling.{name} is unset: a resume takes Started.sampling as it is")
    num_choices = max(sampling.n, 1)
    seen: set[int] = set()
    for i, choice in enumerate(resume.choices):
        field = f"resume.choices[{i}]"
        if choice.index >= num_choices:
            raise InvalidRequest(
                f"{field}.index={choice.index}: sampling.n={num_choices} has choices 0 to {num_choices - 1}"
            )
        if choice.index in seen:
            raise InvalidRequest(f"{field}.index={choice.index} comes twice: give each choice once")
        seen.add(choice.index)
        if len(choice.output_token_ids) > sampling.max_tokens:
            raise InvalidRequest(
                f"{field}.output_token_ids has {len(choice.output_token_ids)} tokens: "
                f"sampling.max_tokens={sampling.max_tokens} allows no more than that"
            )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 140 else text[:140] + "...")
