"""Outputs that a request wants parsed: in which formats, and by which parsers."""

import logging
from collections.abc import Sequence, Set

from protos import inference_pb2 as pb
from router.parsing.families import guess_reasoning_parser, guess_tool_call_parser
from router.parsing.parser import (
    HARMONY,
    HARMONY_REASONING,
    OutputFormat,
    OutputParser,
    tools_in_use,
    without_messages,
)
from router.request.features import constraint, thinking, tools
from router.text.tokenizer import Tokenizer

log = logging.getLogger("octavo.router.outputs")

# Enough for the longest text that a template ends a prompt with to begin or end the reasoning.
_PROMPT_END_TOKENS = 32


def includes_reasoning(message: pb.GenerateRequest) -> bool:
    return message.include_reasoning if message.HasField("include_reasoning") else True


class Outputs:
    """The formats of the served model."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> None:
        """Takes the options: a format's name, auto or none. Raises ValueError if they do not go together."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        calls = guess_tool_call_parser(template) if tool_call_parser == "auto" else tool_call_parser.replace("none", "")
        reasoning = guess_reasoning_parser(template) if reasoning_parser == "auto" else reasoning_parser
        reasoning = reasoning.replace("none", "")
        if reasoning == HARMONY_REASONING and reasoning_parser != "auto" and tool_call_parser == "auto":
            calls = HARMONY
        elif reasoning == HARMONY_REASONING and reasoning_parser == "auto" and calls not in ("", HARMONY):
            reasoning = ""
        self.form = OutputFormat.named(calls, reasoning, template)
        log.info("outputs are parsed: tool calls as %s, reasoning as %s", calls or "none", reasoning or "none")

    def are_parsed(self, chat: pb.ChatPrompt) -> bool:
        """True if a chat's output can have reasoning or calls beside its answer."""
        form = self.form
        may_call = form.calls is not None or chat.tool_choice in (pb.TOOL_CHOICE_REQUIRED, pb.TOOL_CHOICE_NAMED)
        return form.has_reasoning or (may_call and bool(tools_in_use(chat)))

    def resolve(
        self,
        message: pb.GenerateRequest,
        sampling: pb.SamplingParams,
        prompt_token_ids: Sequence[int],
        given: Set[str],
    ) -> pb.ChatPrompt | None:
        """Returns the part of the chat that parsers need; None if the output is not parsed.

        sampling: the request's own copy, in which this sets what parsing, the choice of tools and a budget of reasoning
        need. given: the fields of sampling that are set. Raises InvalidRequest.
        """

        def prompt_end() -> str:
            return self._end_of(prompt_token_ids)

        if message.HasField("resume"):
            tools.check_tools(message.chat)
            thinking.check_resumed(sampling)
        else:
            if message.chat.tools or sampling.HasField("constraint"):
                constraint.resolve(message, sampling, self.form, prompt_end)
            if not thinking.FIELDS.isdisjoint(given):
                thinking.resolve(message, sampling, self.form, self._tokenizer, prompt_end)
        if not message.parse_output:
            return None
        chat = without_messages(message.chat)
        if self.form.keeps_special_tokens(calls=bool(chat.tools)):
            sampling.skip_special_tokens = False
        return chat

    def _end_of(self, prompt_token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)

    def parsers(
        self,
        chat: pb.ChatPrompt | None,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        num_choices: int,
        include_reasoning: bool,
    ) -> list[OutputParser]:
        """Returns a parser for each choice; none if the output is not parsed. chat: what `resolve` returned."""
        if chat is None:
            return []
        prompt_end = self._end_of(prompt_token_ids)
        return [
            OutputParser(
                self.form,
                chat,
                request_id=request_id,
                choice=choice,
                prompt_end=prompt_end,
                include_reasoning=include_reasoning,
            )
            for choice in range(num_choices)
        ]
