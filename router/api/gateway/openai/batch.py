"""The reply to a batch of chats, in vLLM's shape: one chat completion with the choices of all."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import Grow, uncounted
from router.api.gateway.openai.chat import ChatReply
from router.api.gateway.openai.form import BatchForm
from router.api.gateway.openai.reply import Reply, TokenTable

# Fields of a chat's own answer; in a batch, those of its choices.
_OF_PROMPT = ("prompt_logprobs", "prompt_token_ids", "prompt_text")


class BatchReply(Reply):
    """Choice i of chat c is choice c * n + i."""

    def __init__(self, form: BatchForm, base: dict[str, Any], table: TokenTable, grow: Grow = uncounted) -> None:
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
