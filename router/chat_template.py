"""Renders a model's chat template as transformers does, without importing it.

Templates come with the model, from anywhere: they run in jinja2's immutable sandbox and see plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


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

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: bos_token and its kin, by name. Raises TemplateError if the source does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_TemplateDict()
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, object] | None = None,
    ) -> str:
        """messages: role and content of each. arguments: more variables, of JSON types. Raises TemplateError."""
        variables = {**self._special_tokens, "tools": None, "documents": None, **(arguments or {})}
        variables.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
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
        ) as error:
            # The template's own expressions raise these on messages it does not expect.
            raise TemplateError(f"{type(error).__name__}: {error}") from None


class _TemplateDict:
    """`dict(...)` in a template, without the type's attributes."""

    def __call__(self, *args: object, **values: object) -> dict:
        return dict(*args, **values)  # type: ignore[arg-type]
