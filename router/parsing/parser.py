"""Tells an output's reasoning, answer and calls apart, as a fold over its text."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

from protos.inference_pb2 import (
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    ChatPrompt,
    Delta,
    ReasoningMarks,
    Tool,
)
from router.parsing.deltas import Deltas, call_id
from router.parsing.families import JSON_LIST, TOOL_FORMATS, ToolFormat
from router.parsing.reasoning import (
    HARMONY_ENFORCED_END,
    HARMONY_ENFORCED_END_WITH_TOOLS,
    REASONING_FORMATS,
    ReasoningFormat,
    enforced_end,
    harmony_marks,
)
from router.parsing.source import Source, T
from router.parsing.tools import Tools
from runtime.grammar.reasoning.fold import Reasoning

HARMONY = "openai"
# The name of the reasoning in harmony's channels, which the format of its calls reads along.
HARMONY_REASONING = "openai_gptoss"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The parts that a model writes beside its answer. None: the text has none of it."""

    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def named(cls, tool_call_parser: str, reasoning_parser: str, template: str = "") -> "OutputFormat":
        """Takes the names of formats; empty: none. template: the chat template, which shows how calls are written.

        Raises ValueError.
        """
        if reasoning_parser == HARMONY_REASONING:
            if tool_call_parser not in ("", HARMONY):
                raise ValueError(
                    f"reasoning_parser={HARMONY_REASONING} goes with tool_call_parser={HARMONY}, "
                    f"not with {tool_call_parser}"
                )
            tool_call_parser, reasoning_parser = HARMONY, ""
        calls = _named("tool_call_parser", tool_call_parser, TOOL_FORMATS)
        return cls(
            None if calls is None else calls.for_template(template),
            _named("reasoning_parser", reasoning_parser, REASONING_FORMATS),
        )

    @property
    def is_harmony(self) -> bool:
        return self.calls is not None and self.calls.name == HARMONY

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.is_harmony

    def keeps_special_tokens(self, *, calls: bool) -> bool:
        """True if the text must keep special tokens, for they are marks. calls: the request has tools."""
        return self.reasoning is not None or (
            self.calls is not None and self.calls.keeps_special_tokens and (calls or self.is_harmony)
        )

    def reasoning_marks(self, chat: ChatPrompt, prompt_end: str) -> ReasoningMarks | None:
        """Returns where an output has its reasoning; None: it has none. prompt_end: as in OutputParser."""
        if self.reasoning is None:
            return harmony_marks(prompt_end) if self.is_harmony else None
        calls = _calls_format(self.calls, chat) if tools_in_use(chat) else None
        return self.reasoning.marks(prompt_end, () if calls is None else calls.marks)

    def enforced_end(self, marks: ReasoningMarks, chat: ChatPrompt, after: str) -> str:
        """Returns the text that ends a reasoning whose budget is spent. after: where the output's constraint begins."""
        if self.reasoning is not None:
            text = self.reasoning.enforced_end
        elif tools_in_use(chat) and not after:
            text = HARMONY_ENFORCED_END_WITH_TOOLS
        else:
            text = HARMONY_ENFORCED_END
        return enforced_end(text, marks.ends, after)


def _named(option: str, name: str, known: dict[str, T]) -> T | None:
    if not name:
        return None
    if name not in known:
        raise ValueError(f"{option}={name} is unknown; known: {', '.join(sorted(known))}")
    return known[name]


def without_messages(chat: ChatPrompt) -> ChatPrompt:
    """Returns the part of a chat that parsers read."""
    part = ChatPrompt(tools=chat.tools, tool_choice=chat.tool_choice, tool_name=chat.tool_name)
    if chat.HasField("parallel_tool_calls"):
        part.parallel_tool_calls = chat.parallel_tool_calls
    return part


def tools_in_use(chat: ChatPrompt) -> Sequence[Tool]:
    """The tools that the model may call."""
    return () if chat.tool_choice == TOOL_CHOICE_NONE else chat.tools


class OutputParser:
    """One choice's output. What it has given out is a function of the text so far, however that came in pieces."""

    def __init__(
        self,
        form: OutputFormat,
        chat: ChatPrompt,
        *,
        request_id: str,
        choice: int,
        prompt_end: str = "",
        include_reasoning: bool = True,
    ) -> None:
        """chat: its tools and their choice count. prompt_end: the text of the prompt's last tokens, with special ones:
        it says if the output begins inside the reasoning. include_reasoning: False leaves it out."""
        only_one = chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
        id_of = form.calls.id_of if form.calls is not None else call_id
        self._deltas = Deltas(
            partial(id_of, request_id, choice),
            max_calls=1 if only_one else None,
            include_reasoning=include_reasoning,
        )
        # Counts the tokens of the reasoning, which its owner gives it: the text does not tell them. None: it has none.
        marks = form.reasoning_marks(chat, prompt_end)
        self.reasoning = None if marks is None else Reasoning(marks)
        self._source = Source()
        self._reading = self._read(form, chat, prompt_end)
        next(self._reading)

    @property
    def num_calls(self) -> int:
        return self._deltas.num_calls

    @property
    def num_malformed(self) -> int:
        """Texts that began as a call and broke. Those that `finish` adds were cut off by the end of the text."""
        return self._deltas.num_malformed

    def push(self, text: str) -> list[Delta]:
        """Takes more text; returns what is certain now."""
        if not text:
            return []
        self._source.add(text)
        next(self._reading)
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        """Takes the end of the text; returns the rest. Nothing may be pushed after it."""
        self._source.ended = True
        whole = next(self._reading, self)
        assert whole is self, "a format waits for text behind the end"
        self._deltas.end()
        return self._deltas.take()

    def _read(self, form: OutputFormat, chat: ChatPrompt, prompt_end: str) -> Generator[None, None, None]:
        source, deltas = self._source, self._deltas
        # Nothing is read before the first text or the end.
        yield
        tools = tools_in_use(chat)
        calls = _calls_format(form.calls, chat) if tools else None
        if form.reasoning is not None:
            yield from form.reasoning.read(source, deltas, prompt_end, calls.marks if calls is not None else ())
        if calls is not None:
            yield from calls.read(source, deltas, Tools(tools))
        elif form.calls is not None and form.is_harmony:
            yield from form.calls.read(source, deltas, Tools(()))
        yield from source.rest(deltas.content)


def _calls_format(form: ToolFormat | None, chat: ChatPrompt) -> ToolFormat | None:
    """The format in which calls come: where a grammar makes them, one that it can make."""
    can_be_made = form is not None and form.markup is not None
    if not can_be_made and chat.tool_choice in (TOOL_CHOICE_REQUIRED, TOOL_CHOICE_NAMED):
        return JSON_LIST
    return form
