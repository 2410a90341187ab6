"""Outputs that a request wants parsed: in which formats, and by which parsers."""

import logging
from collections.abc import Sequence

from protos import inference_pb2 as pb
from router.errors import InvalidConstraint, InvalidRequest, InvalidTools
from router.intake.thinking import bound_reasoning, check_marks
from router.intake.tools import check_tools
from router.parsing.grammar import UnenforceableError, check_schemas_size, is_json_answer, tool_constraint
from router.parsing.guess import guess_reasoning_parser, guess_tool_call_parser
from router.parsing.parser import (
    HARMONY,
    HARMONY_REASONING,
    OutputFormat,
    OutputParser,
    tools_in_use,
    without_messages,
)
from router.text.tokenizer import Tokenizer

log = logging.getLogger("octavo.router.outputs")

# Enough for the longest text that a template ends a prompt with to begin or end the reasoning.
_PROMPT_END_TOKENS = 32
# Where the answer begins in harmony.
_HARMONY_ANSWER = "<|channel|>final<|message|>"


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
        """Tells whether a chat's output may be more than its answer."""
        form = self.form
        may_call = form.calls is not None or chat.tool_choice in (pb.TOOL_CHOICE_REQUIRED, pb.TOOL_CHOICE_NAMED)
        return form.has_reasoning or (may_call and bool(tools_in_use(chat)))

    def check_size(self, message: pb.GenerateRequest) -> None:
        """Refuses tools that are too large for a constraint, before a template has shown them. Raises InvalidTools."""
        if not message.HasField("resume"):
            try:
                check_schemas_size(self.form.calls, message.chat)
            except UnenforceableError as error:
                raise InvalidTools(str(error)) from None

    def resolve(self, message: pb.GenerateRequest, prompt_token_ids: Sequence[int]) -> pb.ChatPrompt | None:
        """Returns the part of the chat that parsers need; None if the output is not parsed.

        Sets what parsing and the choice of tools need in the message's sampling. Raises InvalidRequest.
        """
        if message.HasField("resume"):
            check_tools(message.chat)
            check_marks(message.sampling)
        else:
            self._constrain(message, prompt_token_ids)
            bound_reasoning(message, self.form, self._tokenizer, self._end_of(prompt_token_ids))
        if not message.parse_output:
            return None
        if message.HasField("beam_search"):
            raise InvalidRequest("parse_output and beam_search are set: outputs of a search are not parsed; use one")
        chat = without_messages(message.chat)
        if self.form.keeps_special_tokens(calls=bool(chat.tools)):
            message.sampling.skip_special_tokens = False
        return chat

    def _constrain(self, message: pb.GenerateRequest, prompt_token_ids: Sequence[int]) -> None:
        """Sets the constraint that makes calls follow the chat's tools, and where a client's own one begins in a parsed
        output. A resume brings both. Raises InvalidRequest."""
        sampling, form = message.sampling, self.form
        own = sampling.constraint if sampling.HasField("constraint") else None
        is_answers = own is not None and message.parse_output and is_json_answer(own)
        try:
            constraint = tool_constraint(form.calls, message.chat, sampling.constraint if is_answers else None)
        except UnenforceableError as error:
            raise InvalidTools(str(error)) from None
        if constraint is not None:
            others = "chat.tool_choice or a strict tool says what the output must be"
            if own is not None and not is_answers:
                raise InvalidConstraint(
                    f"it is set, and {others}: use one, or JSON in a parsed output, without `after`"
                )
            for name, is_set in (
                ("sampling.ignore_eos", sampling.ignore_eos),
                ("beam_search", message.HasField("beam_search")),
            ):
                if is_set:
                    raise InvalidRequest(f"{name} is set, and {others}: use one")
            sampling.constraint.CopyFrom(constraint)
        elif not sampling.HasField("constraint") or not (
            message.parse_output or sampling.HasField("thinking_token_budget")
        ):
            return
        if sampling.constraint.after:
            return
        if form.reasoning is not None:
            sampling.constraint.after = form.reasoning.grammar_after(self._end_of(prompt_token_ids))
        elif constraint is None and form.is_harmony:
            sampling.constraint.after = _HARMONY_ANSWER

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
