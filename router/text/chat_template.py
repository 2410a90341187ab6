"""Reads a model's chat template and renders chats with it, as transformers does, but without importing transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict

from protos.inference_pb2 import TOOL_CHOICE_NONE, ChatMessage, ChatPrompt, Tool, ToolCall
from router.text.bounded_jinja import BoundedEnvironment
from runtime.grammar.json_text import json_object
from runtime.tokenizer.files import TokenizerError

# The names under which templates know special tokens, as in transformers.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The template refused the messages, or can't be rendered; the message is the template's own."""


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} marks the assistant's tokens for training; rendering shows just what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with a leading underscore, which lead into Python's internals."""

    def __init__(*args: object, **values: object) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **values)  # type: ignore[arg-type]
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template can't store the attribute {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. Safe to render from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, whose: str = "model") -> None:
        """special_tokens: bos_token and the like, by name. whose: model, or request, for a template from a client.

        Raises TemplateError if the source does not compile.
        """
        environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
            **({} if whose == "model" else _NOTHING_COMPUTED),
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_TemplateDict()
        )
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, OverflowError) as error:
            raise TemplateError(f"the {whose}'s chat template does not compile: {error}") from None
        self.source = source
        self._takes_text: bool | None = None
        self._environment = environment
        self._special_tokens = dict(special_tokens)

    @property
    def takes_text(self) -> bool:
        """False if the template shows a message's content only where it comes in parts, as those of some models with
        images do. Tried out when it is first asked for."""
        if self._takes_text is None:
            probe = "octavo"
            in_parts = [{"type": "text", "text": probe}]
            shows_parts = probe in self._tried(in_parts) and "'type'" not in self._tried(in_parts)
            self._takes_text = not shows_parts or probe in self._tried(probe)
        return self._takes_text

    def _tried(self, content: object) -> str:
        """Renders a message; empty if the template refuses it."""
        try:
            return self.render([{"role": "user", "content": content}], add_generation_prompt=False)
        except TemplateError:
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """messages: role and content of each. arguments: more variables, of JSON types.

        Raises TemplateError, also for what takes longer or gives more text than router.text.bounded_jinja allows.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **(arguments or {})}
        variables.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            with self._environment.bounded():
                return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error) or type(error).__name__) from None
        except (
            TypeError,
            ValueError,
            KeyError,
            ArithmeticError,
            AttributeError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as error:
            # The template's own expressions raise these on messages it does not expect.
            raise TemplateError(f"{type(error).__name__}: {error}") from None


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: object) -> object:
    return value


# Options of an environment that computes no constant expression while it compiles, when time has no bound. A `finalize`
# that takes the context keeps it from those that are shown.
_NOTHING_COMPUTED: dict[str, Any] = {"optimized": False, "finalize": _as_it_is}


class _TemplateDict:
    """`dict(...)` in a template, without the type's attributes."""

    def __call__(self, *args: object, **values: object) -> dict:
        return dict(*args, **values)  # type: ignore[arg-type]


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Returns bos_token and the like, by name. Raises TokenizerError."""
    special = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = special.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def read_chat_template(directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the model's own template; None if it has none. Raises TokenizerError."""
    config = _read_json(directory / "tokenizer_config.json")
    source: object = config.get("chat_template")
    if isinstance(source, list):
        source = _default_template(source, directory)
    if (directory / "chat_template.json").is_file():
        source = _read_json(directory / "chat_template.json").get("chat_template", source)
    if (directory / "chat_template.jinja").is_file():
        source = _read_text(directory / "chat_template.jinja")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except TemplateError as error:
        raise TokenizerError(f"{directory}: {error}") from None


def _default_template(entries: list, directory: Path) -> object:
    """Returns the template named default, or the first. entries: objects with a name and a template."""
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        path = directory / "tokenizer_config.json"
        raise TokenizerError(f"{path}: each entry of chat_template needs a name and a template") from None
    return named.get("default") or next(iter(named.values()), None)


def _read_json(path: Path) -> dict:
    """Returns the object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(read, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return read


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}") from None


def up_to_the_end_of(content: str, text: str) -> str:
    """Cuts a rendered chat behind its last message's content, without the spaces that the template trims off it.

    Raises TemplateError.
    """
    stripped = content.strip()
    begin = text.rfind(stripped)
    if not stripped or begin < 0:
        raise TemplateError("continue_final_message: the template does not show the last message's content as it is")
    end, spaces = begin + len(stripped), content[len(content.rstrip()) :]
    return text[: end + len(spaces)] if text.startswith(spaces, end) else text[:end]


def message_text(message: ChatMessage) -> str:
    """Returns all that a message says in words."""
    return message.content or "".join(part.text for part in message.parts)


def _content(message: ChatMessage, *, takes_text: bool) -> str | list[dict[str, str]]:
    """Returns text, or parts where the template needs them: for items, and if it takes nothing else."""
    if takes_text and not any(part.HasField("item") for part in message.parts):
        return message_text(message)
    if not message.parts:
        return [{"type": "text", "text": message.content}] if message.content else []
    return [
        {"type": part.item.WhichOneof("kind") or ""} if part.HasField("item") else {"type": "text", "text": part.text}
        for part in message.parts
    ]


def template_message(message: ChatMessage, place: str, *, takes_text: bool = True) -> dict[str, object]:
    """Returns a message as templates see it. takes_text: see ChatTemplate. Raises TemplateError."""
    own: dict[str, object] = {"role": message.role, "content": _content(message, takes_text=takes_text)}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        own["tool_calls"] = [_template_call(call, f"{place}.tool_calls[{i}]") for i, call in calls]
    if message.tool_call_id:
        own["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # Templates know it by either name.
        own["reasoning"] = own["reasoning_content"] = message.reasoning
    if not message.fields_json:
        return own
    fields = _json_object(message.fields_json, f"{place}.fields_json")
    if twice := sorted(own.keys() & fields.keys()):
        raise TemplateError(f"{place}.fields_json has {' and '.join(twice)}: each is a field of its own")
    return own | fields


def _template_call(call: ToolCall, place: str) -> dict[str, object]:
    """Returns a call in the form of OpenAI's API, but with arguments as an object, from which templates make what
    their model writes."""
    arguments = _json_object(call.arguments or "{}", f"{place}.arguments")
    own: dict[str, object] = {"id": call.id} if call.id else {}
    return own | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _template_tool(tool: Tool, place: str) -> dict[str, object]:
    """Returns a tool in the form of OpenAI's API."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _json_object(tool.parameters_json, f"{place}.parameters_json")
    return {"type": "function", "function": function}


def _json_object(text: str, name: str) -> dict[str, object]:
    """Raises TemplateError."""
    try:
        return json_object(text, name)
    except ValueError as error:
        raise TemplateError(str(error)) from None


def template_arguments(chat: ChatPrompt) -> dict[str, object]:
    """Returns a chat's extra variables for the template, and its tools if the model may call them. Raises
    TemplateError."""
    arguments = _given_arguments(chat)
    if chat.tools and "tools" in arguments:
        raise TemplateError("tools are among the template's arguments, too: leave them out there")
    if chat.tools and chat.tool_choice != TOOL_CHOICE_NONE:
        arguments["tools"] = [_template_tool(tool, f"tools[{i}]") for i, tool in enumerate(chat.tools)]
    return arguments


def _given_arguments(chat: ChatPrompt) -> dict[str, object]:
    """Raises TemplateError."""
    if chat.template_arguments_json:
        return _json_object(chat.template_arguments_json, "template_arguments_json")
    try:
        return _as_written(MessageToDict(chat.template_arguments))
    except (ValueError, JsonError) as error:
        # A NaN, or a Value whose kind is not set.
        raise TemplateError(f"template_arguments are not valid JSON: {error}") from None


def _as_written(value: Any) -> Any:
    """Restores integers and sorts keys, for templates that print them. A protobuf Struct has only doubles (3 arrives as
    3.0), and its order of keys differs between processes: one request would give different prompts."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _as_written(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return value
