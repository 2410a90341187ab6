"""The reply to a completion, whole or in chunks."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.openai.form import Form
from router.api.gateway.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs, text_of
from router.api.gateway.openai.reply import Reply, TokenTable, finish_of, stop_reason

COMPLETION_KIND = "text_completion"


class _Choice:
    """What is kept of one; of a stream, no output."""

    __slots__ = ("finish", "has_begun", "logprobs", "offset", "stop_reason", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        # Characters of its tokens so far; its text may lag behind them.
        self.offset = 0
        self.has_begun = False
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[pb.TokenLogprobs] = []
        self.token_ids: list[int] = []

    @property
    def likelihood(self) -> float:
        """The mean logprob of its tokens."""
        return sum(each.chosen.logprob for each in self.logprobs) / max(len(self.logprobs), 1)


class CompletionReply(Reply):
    """Choice i of prompt p is choice p * n + i."""

    def __init__(
        self, form: Form, base: dict[str, Any], num_prompts: int, echoes: Sequence[str], table: TokenTable
    ) -> None:
        """base: id, created and model. echoes: each prompt's text, if it is to come first."""
        super().__init__(form, {"object": COMPLETION_KIND, **base}, num_prompts, table)
        self._echoes = echoes
        self._choices = [_Choice() for _ in range(num_prompts * form.num_choices)]

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        form = self._form
        index = prompt * form.num_choices + chunk.index
        choice = self._choices[index]
        if finish := finish_of(chunk):
            choice.finish, choice.stop_reason = finish, stop_reason(chunk.finish)
        if not form.is_stream:
            choice.text += chunk.text
            choice.logprobs += chunk.logprobs
            if form.has_token_ids:
                choice.token_ids += chunk.token_ids
            return None
        shown = self._shown(prompt, choice, chunk.text, chunk.logprobs, chunk.token_ids)
        piece: dict[str, Any] = {"index": index, **shown}
        if finish:
            piece["stop_reason"] = choice.stop_reason
        return {**self._base, "choices": [piece]}

    def whole(self) -> dict[str, Any]:
        form = self._form
        choices: list[dict[str, Any]] = []
        for prompt in range(len(self.prompts)):
            own = self._choices[prompt * form.num_choices :][: form.num_choices]
            if form.num_shown < form.num_choices:
                own = sorted(own, key=lambda choice: choice.likelihood, reverse=True)[: form.num_shown]
            for choice in own:
                shown = self._shown(prompt, choice, choice.text, choice.logprobs, choice.token_ids)
                shown["stop_reason"] = choice.stop_reason
                if form.num_prompt_logprobs is not None:
                    shown["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs[prompt], form.num_prompt_logprobs)
                choices.append({"index": len(choices), **shown})
        return {**self._base, "choices": choices, "usage": self.usage}

    def _shown(
        self,
        prompt: int,
        choice: _Choice,
        text: str,
        logprobs: Sequence[pb.TokenLogprobs],
        token_ids: Sequence[int],
    ) -> dict[str, Any]:
        form = self._form
        finish = choice.finish
        if form.drops_output:
            text, logprobs, token_ids = "", (), ()
            finish = finish and "length"
        shown_logprobs = echoed = None
        begins, choice.has_begun = not choice.has_begun, True
        if begins and form.has_echo:
            text = self._echoes[prompt] + text
            if form.num_logprobs is not None:
                echoed = self._echoed(prompt, form.num_logprobs)
                choice.offset = echoed["text_offset"][-1] + len(text_of(self._last_of(prompt)))
            else:
                choice.offset = len(self._echoes[prompt])
        if form.num_logprobs is not None:
            shown_logprobs = completion_logprobs(logprobs, choice.offset, as_ids=form.has_ids_for_tokens)
            choice.offset += sum(len(text_of(each.chosen)) for each in logprobs)
            if echoed is not None:
                shown_logprobs = {name: [*echoed[name], *shown_logprobs[name]] for name in echoed}
        shown: dict[str, Any] = {"text": text, "logprobs": shown_logprobs, "finish_reason": finish}
        if form.has_token_ids:
            shown["token_ids"] = list(token_ids)
            if begins:
                shown["prompt_token_ids"] = self.prompts[prompt]
        return shown

    def _echoed(self, prompt: int, num_top: int) -> dict[str, Any]:
        logprobs, as_ids = self._prompt_logprobs[prompt], self._form.has_ids_for_tokens
        return echoed_logprobs(self._token(self.prompts[prompt][0]), logprobs, num_top, as_ids=as_ids)

    def _last_of(self, prompt: int) -> pb.TokenLogprob:
        return self._token(self.prompts[prompt][-1])

    def _token(self, token_id: int) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, token=self._table.token_bytes(token_id))
