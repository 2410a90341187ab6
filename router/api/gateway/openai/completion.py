"""The reply to a completion, whole or in chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedList, EncodedText, Grow, uncounted
from router.api.gateway.openai.form import Form
from router.api.gateway.openai.logprobs import CompletionLogprobs, completion_logprobs, text_of
from router.api.gateway.openai.reply import Reply, finish_of, stop_reason
from router.text.tokenizer import Tokenizer

COMPLETION_KIND = "text_completion"


class _Choice:
    """The parts of one that are kept; of a stream, no output."""

    __slots__ = (
        "finish",
        "has_begun",
        "likelihood",
        "logprobs",
        "num_scored",
        "offset",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, grow: Grow) -> None:
        self.text = EncodedText(grow=grow)
        self.token_ids = EncodedList(grow)
        self.logprobs: CompletionLogprobs | None = None
        # The sum of the logprobs of its tokens, and their number.
        self.likelihood, self.num_scored = 0.0, 0
        # Characters of a stream's tokens so far; its text may lag behind them.
        self.offset = 0
        self.has_begun = False
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def mean_logprob(self) -> float:
        return self.likelihood / max(self.num_scored, 1)


class CompletionReply(Reply):
    """Choice i of prompt p is choice p * n + i."""

    def __init__(
        self,
        form: Form,
        base: dict[str, Any],
        num_prompts: int,
        echoes: Sequence[str],
        table: Tokenizer,
        grow: Grow = uncounted,
    ) -> None:
        """base: id, created and model. echoes: each prompt's text, if it is to come first. grow: as in Reply."""
        super().__init__(form, {"object": COMPLETION_KIND, **base}, num_prompts, table, grow)
        self._echoes = echoes
        self._choices = [_Choice(grow) for _ in range(num_prompts * form.num_choices)]

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        form = self._form
        index = prompt * form.num_choices + chunk.index
        choice = self._choices[index]
        if finish := finish_of(chunk):
            choice.finish, choice.stop_reason = finish, stop_reason(chunk.finish)
        if not form.is_stream:
            self._keep(prompt, choice, chunk)
            return None
        shown = self._shown(prompt, choice, chunk)
        piece: dict[str, Any] = {"index": index, **shown}
        if finish:
            piece["stop_reason"] = choice.stop_reason
        return {**self._base, "choices": [piece]}

    # --- Whole

    def _keep(self, prompt: int, choice: _Choice, chunk: pb.Chunk) -> None:
        form = self._form
        if not choice.has_begun:
            choice.has_begun = True
            choice.text.add(self._echoes[prompt] if form.has_echo else "")
            choice.logprobs = self._logprobs_of(prompt)
        if form.num_shown < form.num_choices:
            choice.likelihood += sum(each.chosen.logprob for each in chunk.logprobs)
            choice.num_scored += len(chunk.logprobs)
        if form.drops_output:
            return
        choice.text.add(chunk.text)
        if choice.logprobs is not None:
            choice.logprobs.add(chunk.logprobs)
        if form.has_token_ids:
            choice.token_ids.extend(list(chunk.token_ids))

    def whole(self) -> dict[str, Any]:
        return {**self._base, "choices": self._whole_choices(), "usage": self.usage}

    def _whole_choices(self) -> Iterator[dict[str, Any]]:
        form, num_before = self._form, 0
        for prompt in range(len(self.prompts)):
            own = self._choices[prompt * form.num_choices :][: form.num_choices]
            if form.num_shown < form.num_choices:
                own = sorted(own, key=lambda choice: choice.mean_logprob, reverse=True)[: form.num_shown]
            for index, choice in enumerate(own, num_before):
                shown = {
                    "index": index,
                    "text": choice.text,
                    "logprobs": None if choice.logprobs is None else choice.logprobs.shown(),
                    "finish_reason": self._finish(choice),
                }
                if form.has_token_ids:
                    shown |= {"token_ids": choice.token_ids, "prompt_token_ids": self.prompts[prompt]}
                shown["stop_reason"] = choice.stop_reason
                if form.num_prompt_logprobs is not None:
                    shown["prompt_logprobs"] = self._prompt_logprobs[prompt]
                yield shown
            num_before += len(own)

    def _logprobs_of(self, prompt: int) -> CompletionLogprobs | None:
        """Returns those that a choice begins with."""
        form = self._form
        if form.num_logprobs is None:
            return None
        before = self._echoed[prompt] if self._echoed else None
        offset = len(self._echoes[prompt]) if form.has_echo else 0
        return CompletionLogprobs(self._grow, before, as_ids=form.has_ids_for_tokens, offset=offset)

    def _finish(self, choice: _Choice) -> str | None:
        return choice.finish and "length" if self._form.drops_output else choice.finish

    # --- Streamed

    def _shown(self, prompt: int, choice: _Choice, chunk: pb.Chunk) -> dict[str, Any]:
        form = self._form
        text, logprobs, token_ids = chunk.text, chunk.logprobs, chunk.token_ids
        if form.drops_output:
            text, logprobs, token_ids = "", (), ()
        shown_logprobs: Any = None
        begins, choice.has_begun = not choice.has_begun, True
        if begins and form.has_echo:
            text = self._echoes[prompt] + text
            if not self._echoed:
                choice.offset = len(self._echoes[prompt])
        if begins and self._echoed:
            first = CompletionLogprobs(uncounted, self._echoed[prompt], as_ids=form.has_ids_for_tokens)
            first.add(logprobs)
            shown_logprobs, choice.offset = first.shown(), first.offset
        elif form.num_logprobs is not None:
            shown_logprobs = completion_logprobs(logprobs, choice.offset, as_ids=form.has_ids_for_tokens)
            choice.offset += sum(len(text_of(each.chosen)) for each in logprobs)
        shown: dict[str, Any] = {"text": text, "logprobs": shown_logprobs, "finish_reason": self._finish(choice)}
        if form.has_token_ids:
            shown["token_ids"] = list(token_ids)
            if begins:
                shown["prompt_token_ids"] = self.prompts[prompt]
        return shown
