"""Jinja's sandbox with bounds on the time that a template takes and on the text that it makes.

A template comes with the model, but what it loops over comes from clients: 16,384 messages kept a template with three
nested loops busy for days.
"""

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jinja2
import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Processor time, which other threads and processes do not shorten. A chat of 16,384 messages takes 0.05 s.
RENDER_S = 2.0
# Length of any text that a template joins, and of lists and tuples that it multiplies.
MOST_CHARS = 2**25
_MOST_BITS = 2**16

_LOOP = "_bounded_loop"
_WIDTHS = re.compile(r"[0-9]{6,}")
# Ways to format a text, and where it takes widths from its arguments.
_TAKES_WIDTHS = {"%": re.compile(r"%[^a-zA-Z%]*\*"), "format": re.compile(r"\{[^{}]*\{")}


class BoundError(jinja2.TemplateRuntimeError):
    """A template goes beyond a bound."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time at each round of a loop and at each call, of macros too, and sizes wherever texts are joined."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, *, clock: Callable[[], float] = time.thread_time, **options) -> None:
        """clock: seconds that the calling thread has computed. options: of jinja2.Environment."""
        super().__init__(**options)
        self._clock = clock
        self._running = threading.local()
        self.filters[_LOOP] = _loop
        for name, operation in {"center": "center", "format": "%", "indent": "indent", "replace": "replace"}.items():
            self.filters[name] = _bounded_filter(operation, self.filters[name])

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Bounds the template that the calling thread renders inside."""
        self._running.ends_at = self._clock() + RENDER_S
        try:
            yield
        finally:
            del self._running.ends_at

    def check_time(self) -> None:
        """Raises BoundError."""
        if self._clock() > self._running.ends_at:
            raise BoundError(
                f"the chat template has computed for {RENDER_S:g} s without an end: send fewer messages, or "
                "smaller template arguments"
            )

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a template, a macro or a block gives. Raises BoundError."""
        taken: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            taken.append(piece)
        return "".join(taken)

    def call(__self, __context: Context, __obj, *args, **kwargs):
        __self.check_time()
        if isinstance(text := getattr(__obj, "__self__", None), str):
            _check_text_call(__obj.__name__, text, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if function is None or not isinstance(text, str):
            return function

        def bounded(*args, **kwargs) -> str:
            _check_text_call("format", text, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left, right):
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right * left.bit_length() > _MOST_BITS:
                raise BoundError(f"the chat template computes a number of more than {_MOST_BITS} bits")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(sequence) * count)
        elif operator == "%" and isinstance(left, str):
            _check_text_call("%", left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        return template


@jinja2.pass_context
def _loop(context: Context, iterable: Iterable[object]) -> Iterator[object]:
    """Yields the items of a loop, and checks the time before each."""
    environment = context.environment
    assert isinstance(environment, BoundedEnvironment)
    for item in iterable:
        environment.check_time()
        yield item


def _bounded_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def bounded(*args, **kwargs):
        # Some filters get the environment or a context first.
        place = next((place for place, each in enumerate(args) if isinstance(each, str)), None)
        if place is not None:
            _check_text_call(name, args[place], (*args[place + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _check_text_call(name: str, text: str, args: Sequence[object]) -> None:
    """Checks a call of a text's method before it makes a longer text. Raises BoundError."""
    if takes_widths := _TAKES_WIDTHS.get(name):
        num_checked = len(args) if takes_widths.search(text) else 0
    else:
        num_checked = len(args)
    for each in args[:num_checked]:
        if isinstance(each, int):
            _check_size(each)
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(text) // max(len(args[0]), 1) * len(args[1]))
    elif takes_widths:
        for width in _WIDTHS.findall(text):
            _check_size(int(width[:10]))


def _check_size(size: int) -> None:
    if size > MOST_CHARS:
        raise BoundError(f"the chat template makes a text of more than {MOST_CHARS} characters from this chat")
