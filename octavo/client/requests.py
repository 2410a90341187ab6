"""Builds the request message for the router from a prompt, sampling parameters and options."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from configs.sampling import ALL_LOGPROBS
from octavo.client.constraints import Constraint
from octavo.client.errors import InvalidRequest
from octavo.client.media import ItemSource, content_parts, item_of, item_options, multi_modal_items
from octavo.client.tools import Tool, add_tools, json_text, typed_call
from protos import inference_pb2 as pb
from runtime.telemetry.traceparent import TRACEPARENT, valid_traceparent


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends an output that repeats a pattern of min_pattern_size to max_pattern_size tokens min_count times."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int


_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The fields and ranges of `SamplingParams` in protos/inference.proto; the names are vLLM's.

    None leaves a field to the model's default (ModelInfo.default_sampling), then to the protocol's. The server checks
    ranges.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_n_sigma: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_detection: RepetitionDetection | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    bad_word_token_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    constraint: Constraint | None = None
    thinking_token_budget: int | None = None
    # Upper bound of the draft tokens of a choice in a step; 0: no speculation. The output is the same with any.
    num_speculative_tokens: int | None = None

    def to_proto(self) -> pb.SamplingParams:
        """Converts to the wire message. Raises InvalidRequest for a value it cannot carry, such as a negative count."""
        message = pb.SamplingParams()
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            try:
                if each.name == "logit_bias":
                    message.logit_bias.update(value)
                elif each.name == "stop":
                    message.stop.extend([value] if isinstance(value, str) else value)
                elif each.name in ("logprobs", "prompt_logprobs") and value == -1:
                    setattr(message, each.name, ALL_LOGPROBS)
                elif each.name in _LISTS:
                    getattr(message, each.name).extend(value)
                elif isinstance(value, Constraint):
                    message.constraint.CopyFrom(value.to_proto())
                elif isinstance(value, RepetitionDetection):
                    message.repetition_detection.CopyFrom(pb.RepetitionDetection(**asdict(value)))
                elif each.name == "bad_word_token_ids":
                    message.bad_word_token_ids.extend(pb.TokenIds(ids=sequence) for sequence in value)
                else:
                    setattr(message, each.name, value)
            except InvalidRequest:
                raise
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{each.name}={value!r}: {_what_works(each.name, error)}") from None
        return message

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> "SamplingParams":
        """Takes the fields that are set; the others stay None."""
        values: dict[str, object] = {}
        for each in fields(cls):
            described = message.DESCRIPTOR.fields_by_name[each.name]
            if described.has_presence and not message.HasField(each.name):  # type: ignore[arg-type]
                continue
            value = getattr(message, each.name)
            if each.name == "logit_bias":
                value = dict(value)
            elif each.name == "repetition_detection":
                names = (each.name for each in fields(RepetitionDetection))
                value = RepetitionDetection(**{name: getattr(value, name) for name in names})
            elif each.name == "constraint":
                value = Constraint.from_proto(value)
            elif each.name == "bad_word_token_ids":
                value = tuple(tuple(sequence.ids) for sequence in value)
            elif each.name == "stop" or each.name in _LISTS:
                value = tuple(value)
            values[each.name] = value
        return cls(**values)  # type: ignore[arg-type]


_COUNTS = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)


def _what_works(name: str, error: Exception) -> str:
    """Says what a field of SamplingParams takes, where protobuf's error does not."""
    found = pb.SamplingParams.DESCRIPTOR.fields_by_name[name]
    if found.cpp_type not in _COUNTS:
        return str(error)
    numbers = "whole numbers" if name in _LISTS else "a whole number"
    return f"give {numbers} from 0 to {2 ** (32 if found.cpp_type == _COUNTS[0] else 64) - 1}"


def trace_metadata(given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """The trace metadata of a call. given: W3C headers, of which `traceparent` is passed on; None: the current
    OpenTelemetry span of the calling program, if it is in one.

    Raises InvalidRequest if `given` holds a bad traceparent.
    """
    if given is None:
        traceparent = _current_traceparent()
    else:
        traceparent = next((value for name, value in given.items() if name.lower() == TRACEPARENT), "")
        if traceparent and not valid_traceparent(traceparent):
            raise InvalidRequest(
                f"trace_headers: traceparent={traceparent!r}: it must have W3C's form 00-TRACE-SPAN-FLAGS"
            )
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def _current_traceparent() -> str:
    # A program that is in a span has imported this; other programs should not pay for the import.
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers.get(TRACEPARENT, "")


# {"role": ..., "content": ...}, and other keys that the model's template uses. The content is text, or parts
# (octavo.client.media). An assistant's message may have
# "tool_calls" and "reasoning", a tool's result has "tool_call_id".
Message = Mapping[str, Any]
# Text or token ids with images and videos, as vLLM writes it: {"prompt": ... or "prompt_token_ids": ...,
# "multi_modal_data": {"image": one or several, "video": ...}, "mm_processor_kwargs": ...}; a placeholder token of the
# model's stands in the text for each.
PromptWithMedia = Mapping[str, Any]
# Plain text, messages for the chat template, token ids, or a prompt with images. Or the request as it travels, with all
# that docs/wires.md describes: then sampling and options stay away.
Prompt = str | Sequence[Message] | Sequence[int] | PromptWithMedia | pb.GenerateRequest


class OutputOptions(TypedDict, total=False):
    """Options of the parts of an output: calls of tools, reasoning, the answer."""

    # Functions that the model may call. The output is parsed then.
    tools: Sequence[Tool]
    # Default: auto. A tool: a call of it must come.
    tool_choice: Literal["none", "auto", "required"] | Tool
    # False: at most one call.
    parallel_tool_calls: bool
    # Those of `tools` that may be called, of all that the template shows. Default: all.
    allowed_tools: Sequence[Tool]
    # Tells reasoning, content and calls of a chat's output apart. Default: only if there are tools.
    parse_output: bool
    # False leaves the reasoning out of a parsed output.
    include_reasoning: bool


class RequestOptions(OutputOptions, total=False):
    """The options of a call besides prompt and sampling."""

    # The served_model_name; empty: the one that is served.
    model: str
    # Unique among the caller's live requests; empty: the client makes one.
    request_id: str
    # Lower values run first, under scheduling_policy=priority.
    priority: int
    # Only requests with the same salt share prefix-cache blocks.
    cache_salt: str
    # Requests of one session go to one replica, under routing_policy=consistent_hash.
    session_key: str
    # Searches for the sampling.n best outputs with so many beams (docs/wires.md), instead of drawing tokens.
    beam_width: int
    # More than 0 favors long outputs of a beam search. Default: 1.
    length_penalty: float
    # Images and videos for a prompt of text or token ids, in the order of their placeholders: paths, files' bytes,
    # URLs, images of Pillow's, or Video. Those of messages are parts of their content.
    items: Sequence[ItemSource]
    # How images become pixels for the model: {"min_pixels": ..., "max_pixels": ...}.
    mm_processor_kwargs: Mapping[str, int]
    # Seconds for which the request goes on when this client is gone, so that another may `attach`; 0: it ends. Default:
    # the router's option. Closing the stream does not end it then; `cancel` does.
    detach_timeout: float
    # Text that follows the output, which then fills the gap after a prompt of text. For models trained for that.
    suffix: str
    # Extra variables for the chat template.
    template_arguments: Mapping[str, Any]
    # A template (Jinja) to use instead of the model's. Routers need the option trust_request_chat_template.
    chat_template: str
    # W3C headers (traceparent) of the caller's span. Default: OpenTelemetry's current span, if there is one.
    trace_headers: Mapping[str, str]


_OPTIONS = RequestOptions.__optional_keys__
_SAMPLING = frozenset(each.name for each in fields(SamplingParams))


def _why_unknown(option: str) -> str:
    if option in _SAMPLING:
        return f"{option} is a sampling parameter: give SamplingParams({option}=...)"
    near = get_close_matches(option, _OPTIONS | _SAMPLING, n=1)
    hint = f"; did you mean {near[0]}?" if near else f": use one of {', '.join(sorted(_OPTIONS))}"
    return f"{option} is no option of a request{hint}"


def generate_request(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """Builds a request, always with a request_id, so that a retry before the first message is recognised as the same.

    Raises InvalidRequest.
    """
    if unknown := options.keys() - _OPTIONS:
        raise InvalidRequest(_why_unknown(min(unknown)))
    if isinstance(prompt, pb.GenerateRequest):
        return _own(prompt, sampling, options)
    request = pb.GenerateRequest(
        request_id=request_id_of(prompt, options),
        model=options.get("model", ""),
        sampling=(sampling or SamplingParams()).to_proto(),
        priority=options.get("priority", 0),
        cache_salt=options.get("cache_salt", ""),
        session_key=options.get("session_key", ""),
        suffix=options.get("suffix", ""),
    )
    if "detach_timeout" in options:
        try:
            request.detach_timeout = options["detach_timeout"]
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"detach_timeout={options['detach_timeout']!r}: {error}") from None
    if "length_penalty" in options and "beam_width" not in options:
        raise InvalidRequest(
            f"length_penalty={options['length_penalty']!r} is about beam searches: give beam_width, too"
        )
    if "beam_width" in options:
        try:
            request.beam_search.width = options["beam_width"]
            request.beam_search.length_penalty = options.get("length_penalty", 1.0)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"beam_width={options['beam_width']!r}: {error}") from None
    if "mm_processor_kwargs" in options:
        request.item_options.CopyFrom(item_options(options["mm_processor_kwargs"]))
    request.items.extend(item_of(each) for each in options.get("items", ()))
    if isinstance(prompt, Mapping):
        prompt = _add_media(request, prompt)
    is_chat = not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping)
    if options.get("tools") and not is_chat:
        raise InvalidRequest("tools go with messages: give messages in place of a text or token ids")
    if isinstance(prompt, str):
        request.prompt = prompt
    elif is_chat:
        chat = chat_prompt(prompt, options.get("template_arguments"), options.get("chat_template", ""))  # type: ignore[arg-type]
        request.chat.CopyFrom(chat)
        tools = options.get("tools", ())
        add_tools(
            request.chat,
            tools,
            options.get("tool_choice"),
            options.get("parallel_tool_calls"),
            options.get("allowed_tools", ()),
        )
        request.parse_output = options.get("parse_output", bool(tools))
        if "include_reasoning" in options:
            request.include_reasoning = options["include_reasoning"]
    else:
        try:
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a prompt is text, messages or token ids: {error}") from None
        request.token_ids.SetInParent()
    return request


def request_id_of(prompt: Prompt, options: RequestOptions) -> str:
    """Returns the request's own id, or a new one."""
    own = prompt.request_id if isinstance(prompt, pb.GenerateRequest) else ""
    return options.get("request_id") or own or uuid.uuid4().hex


def _own(message: pb.GenerateRequest, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """Returns a copy of a message with a request_id. Raises InvalidRequest."""
    if given := [*(["sampling"] if sampling is not None else []), *({*options} - {"request_id", "trace_headers"})]:
        raise InvalidRequest(f"{given[0]} is given beside a GenerateRequest: set the message's own field")
    request = pb.GenerateRequest()
    request.CopyFrom(message)
    request.request_id = request_id_of(message, options)
    return request


def _add_media(request: pb.GenerateRequest, prompt: PromptWithMedia) -> str | Sequence[int]:
    """Adds what comes with a prompt, and returns its text or token ids. Raises InvalidRequest."""
    known = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")
    if unknown := sorted(prompt.keys() - set(known)):
        raise InvalidRequest(f"a prompt has {', '.join(unknown)}: use {', '.join(known)}")
    request.items.extend(multi_modal_items(prompt.get("multi_modal_data") or {}))
    if prompt.get("mm_processor_kwargs"):
        request.item_options.CopyFrom(item_options(prompt["mm_processor_kwargs"]))
    own = [prompt[name] for name in known[:2] if prompt.get(name) is not None]
    if len(own) != 1:
        raise InvalidRequest(f"a prompt has {', '.join(prompt) or 'nothing'}: give prompt or prompt_token_ids")
    return own[0]


def chat_prompt(
    messages: Sequence[Message], template_arguments: Mapping[str, Any] | None, chat_template: str = ""
) -> pb.ChatPrompt:
    """Converts messages to a ChatPrompt. Raises InvalidRequest."""
    chat = pb.ChatPrompt(chat_template=chat_template)
    for message in messages:
        fields = dict(message)
        role, content = fields.pop("role", None), fields.pop("content", None)
        listed = content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else None
        is_content = listed is not None or isinstance(content, str) or (content is None and fields)
        if not isinstance(role, str) or not is_content:
            raise InvalidRequest(f"a message has a role and a content, text or parts, but one has {_types(message)}")
        chat.messages.add(
            role=role,
            content=content if isinstance(content, str) else "",
            parts=content_parts(listed or ()),
            tool_calls=map(typed_call, fields.pop("tool_calls", None) or ()),
            tool_call_id=_text(fields, "tool_call_id"),
            reasoning=_text(fields, "reasoning"),
            fields_json=_json(fields, "a message's other fields"),
        )
    chat.template_arguments_json = _json(template_arguments or {}, "template_arguments")
    return chat


def _types(message: Message) -> str:
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in message.items()) or "nothing"


def _text(fields: dict[str, Any], name: str) -> str:
    """Takes a field out. Raises InvalidRequest."""
    value = fields.pop(name, None)
    if not isinstance(value, str | None):
        raise InvalidRequest(f"a message's {name} is text, not {type(value).__name__}")
    return value or ""


def _json(fields: Mapping[str, Any], name: str) -> str:
    """The fields as JSON, or an empty string if there are none. Raises InvalidRequest."""
    return json_text(fields, name) if fields else ""


def as_messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Makes messages; text becomes one user message."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def tokenize_request(prompt: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, prompt=prompt)
    return pb.TokenizeRequest(model=model, chat=chat_prompt(prompt, None))
