"""The reply to a chat completion, whole or in chunks, and to a batch of chats, in vLLM's shape."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedList, Grow, uncounted
from router.api.gateway.openai.form import BatchForm, Form
from router.api.gateway.openai.logprobs import chat_logprobs
from router.api.gateway.openai.outputs import Output, delta_fields, deltas_of, message_fields
from router.api.gateway.openai.reply import Reply, finish_of, stop_reason
from router.text.tokenizer import Tokenizer


class ChatReply(Reply):
    def __init__(self, form: Form, base: dict[str, Any], table: Tokenizer, grow: Grow = uncounted) -> None:
        """base: id, created and model. grow: as in Reply."""
        super().__init__(form, base, 1, table, grow)
        if form.is_stream:
            self._base = {"object": "chat.completion.chunk", **base}
        n = form.num_choices
        self._outputs = [Output(form.echoed, grow) for _ in range(n)]
        self._has_begun = [False] * n
        self._finish: list[str | None] = [None] * n
        self._stop_reason: list[str | int | None] = [None] * n
        self._logprobs = [EncodedList(grow) for _ in range(n)]
        self._token_ids = [EncodedList(grow) for _ in range(n)]

    def pieces(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, str]]:
        piece = self.take(prompt, event)
        return [] if piece is None else [self._sent(each) for each in _with_one_call_each(piece)]

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        form, index = self._form, chunk.index
        deltas = deltas_of(chunk, is_parsed=form.is_parsed)
        logprobs, token_ids, finish = chunk.logprobs, chunk.token_ids, finish_of(chunk)
        if form.drops_output:
            deltas, logprobs, token_ids, finish = [], (), (), finish and "length"
        elif chunk.finish.has_tool_calls:
            finish = "tool_calls"
        if finish:
            self._finish[index], self._stop_reason[index] = finish, stop_reason(chunk.finish)
        if not form.is_stream:
            self._outputs[index].add(deltas)
            if form.num_logprobs is not None and logprobs:
                shown = chat_logprobs(logprobs, as_ids=form.has_ids_for_tokens)
                self._logprobs[index].extend(shown["content"])
            if form.has_token_ids:
                self._token_ids[index].extend(list(token_ids))
            return None
        begins, self._has_begun[index] = not self._has_begun[index], True
        delta = delta_fields(deltas)
        if begins:
            content = form.echoed + delta.get("content", "")
            # What the content is, is not known yet if something else comes first.
            delta = {"role": form.role, **delta, "content": content if content or not delta else None}
        elif form.is_parsed and not (delta or finish or logprobs or form.has_token_ids or form.has_running_usage):
            return None
        elif not delta:
            delta = {"content": ""}
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._shown(logprobs),
            "finish_reason": finish,
        }
        if finish:
            choice["stop_reason"] = self._stop_reason[index]
        if form.has_token_ids:
            choice["token_ids"] = list(token_ids)
        piece = {**self._base, "choices": [choice]}
        if begins:
            piece.update(self._of_prompt())
        return piece

    def whole(self) -> dict[str, Any]:
        form = self._form
        choices = map(self._whole_choice, range(form.num_choices))
        whole = {"object": "chat.completion", **self._base, "choices": choices, "usage": self.usage}
        if form.num_prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs[0]
        return {**whole, **self._of_prompt()}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        form = self._form
        said = message_fields(self._outputs[index])
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": form.role, **said, "refusal": None},
            "logprobs": None if form.num_logprobs is None else {"content": self._logprobs[index]},
            "finish_reason": self._finish[index],
            "stop_reason": self._stop_reason[index],
        }
        if form.has_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice

    def _shown(self, logprobs: Any) -> dict[str, Any] | None:
        form = self._form
        return None if form.num_logprobs is None else chat_logprobs(logprobs, as_ids=form.has_ids_for_tokens)

    def _of_prompt(self) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._form.has_token_ids:
            shown["prompt_token_ids"] = self.prompts[0]
        if self.prompt_text is not None:
            shown["prompt_text"] = self.prompt_text
        return shown


def _with_one_call_each(piece: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a chunk for each call in a chunk: OpenAI sends one at most, and LlamaIndex reads the first one alone."""
    choices = piece["choices"]
    calls = choices[0]["delta"].get("tool_calls", ()) if choices else ()
    if len(calls) < 2:
        yield piece
        return
    (choice,) = choices
    for index, call in enumerate(calls):
        # What else there is comes with the first one, and the end with the last one.
        is_first, is_last = index == 0, call is calls[-1]
        own = {"index": choice["index"], "logprobs": None, "finish_reason": None} | (choice if is_first else {})
        own["delta"] = (choice["delta"] if is_first else {}) | {"tool_calls": [call]}
        for name in ("finish_reason", "stop_reason"):
            if name in choice and is_last:
                own[name] = choice[name]
            elif name in own:
                own[name] = None
        yield piece | {"choices": [own]}


# Fields of a chat's own answer; in a batch, those of its choices.
_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids", "prompt_text")


class BatchReply(Reply):
    """Choice i of chat c is choice c * n + i."""

    def __init__(self, form: BatchForm, base: dict[str, Any], table: Tokenizer, grow: Grow = uncounted) -> None:
        """base: id, created and model. grow: as in Reply."""
        super().__init__(form, base, 0, table)
        self._chats = [ChatReply(chat, base, table, grow) for chat in form.chats]

    def show_prompt(self, prompt: int, text: str) -> None:
        self._chats[prompt].show_prompt(0, text)

    def take(self, prompt: int, event: pb.GenerateResponse) -> None:
        self._chats[prompt].take(0, event)

    def whole(self) -> dict[str, Any]:
        answers = [chat.whole() for chat in self._chats]
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        num_cached = 0
        details: Counter[str] = Counter()
        for answer in answers:
            for name in usage:
                usage[name] += answer["usage"][name]
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            details.update(answer["usage"].get("completion_tokens_details", {}))
        told: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": num_cached}}
        if details:
            told["completion_tokens_details"] = dict(details)
        choices = _numbered(answers)
        return {"object": "chat.completion", **self._base, "choices": choices, "usage": usage | told}


def _numbered(answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    numbers = itertools.count()
    for answer in answers:
        of_prompt = {name: answer[name] for name in _OF_PROMPT if name in answer}
        for choice in answer["choices"]:
            yield {**choice, **of_prompt, "index": next(numbers)}
