"""The JSON of logprobs, in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedList, Grow

# Tokens of a choice that are encoded at once: one by one, four lists cost twice as much.
_AT_ONCE = 8
# The fields of a completion's logprobs.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def chat_logprobs(logprobs: Sequence[pb.TokenLogprobs], *, as_ids: bool = False) -> dict[str, Any]:
    """as_ids: tokens are named token_id:N."""

    def one(token: pb.TokenLogprob) -> dict[str, Any]:
        return {"token": _name(token, as_ids), "logprob": token.logprob, "bytes": list(token.token)}

    return {"content": [{**one(each.chosen), "top_logprobs": list(map(one, _shown(each)))} for each in logprobs]}


def completion_logprobs(
    logprobs: Sequence[pb.TokenLogprobs], text_offset: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """text_offset: characters of the choice before these tokens."""
    offsets = []
    for each in logprobs:
        offsets.append(text_offset)
        text_offset += len(text_of(each.chosen))
    return {
        "tokens": [_name(each.chosen, as_ids) for each in logprobs],
        "token_logprobs": [each.chosen.logprob for each in logprobs],
        "top_logprobs": [{_name(top, as_ids): top.logprob for top in _shown(each)} for each in logprobs],
        "text_offset": offsets,
    }


class CompletionLogprobs:
    """The logprobs of a completion that comes whole: four lists, encoded as they grow."""

    __slots__ = ("_as_ids", "_lists", "_offset", "_waiting")

    def __init__(
        self, grow: Grow, before: "CompletionLogprobs | None" = None, *, as_ids: bool, offset: int = 0
    ) -> None:
        """before: those of the prompt, if they come first. as_ids: tokens are named token_id:N. offset: characters of
        the choice before its tokens, without those of `before`."""
        self._as_ids = as_ids
        self._lists = {name: EncodedList(grow, before and before.shown()[name]) for name in _LISTS}
        # Characters of the tokens in the lists.
        self._offset = offset if before is None else before.offset
        # The next ones, which are encoded some at once.
        self._waiting: list[pb.TokenLogprobs] = []

    @property
    def offset(self) -> int:
        """Characters of the tokens so far."""
        self._encode()
        return self._offset

    def add(self, logprobs: Sequence[pb.TokenLogprobs]) -> None:
        self._waiting += logprobs
        if len(self._waiting) >= _AT_ONCE:
            self._encode()

    def shown(self) -> dict[str, EncodedList]:
        self._encode()
        return self._lists

    def _encode(self) -> None:
        if self._waiting:
            shown = completion_logprobs(self._waiting, self._offset, as_ids=self._as_ids)
            self._offset = shown["text_offset"][-1] + len(text_of(self._waiting[-1].chosen))
            self._waiting = []
            self._extend(shown)

    def _extend(self, shown: dict[str, Any]) -> None:
        for name, values in self._lists.items():
            values.extend(shown[name])


class EchoedLogprobs(CompletionLogprobs):
    """Those of a prompt that comes first."""

    __slots__ = ()

    def begin(self, first: pb.TokenLogprob) -> None:
        """first: its first token, which nothing precedes."""
        name = _name(first, self._as_ids)
        self._extend({"tokens": [name], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]})
        self._offset = len(text_of(first))

    def add_prompt(self, logprobs: Sequence[pb.TokenLogprobs], num_top: int) -> None:
        shown = completion_logprobs(logprobs, self._offset, as_ids=self._as_ids)
        shown["top_logprobs"] = [
            {_name(top, self._as_ids): top.logprob for top in each.top[:num_top]} for each in logprobs
        ]
        self._offset += sum(len(text_of(each.chosen)) for each in logprobs)
        self._extend(shown)


def prompt_logprobs(logprobs: Sequence[pb.TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """Returns a part of vLLM's list, {token id: {logprob, rank, decoded_token}} for each token."""

    def one(each: pb.TokenLogprobs) -> dict[str, Any]:
        shown = [each.chosen, *each.top[:num_top]]
        return {
            str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": text_of(token)}
            for token in shown
        }

    return list(map(one, logprobs))


def text_of(token: pb.TokenLogprob) -> str:
    """The text of a token, with U+FFFD for bytes that are no whole character."""
    return token.token.decode(errors="replace")


def _shown(each: pb.TokenLogprobs) -> Sequence[pb.TokenLogprob]:
    """Returns the tokens beside the chosen one; before listed ones also that one itself, as vLLM does."""
    if not each.top or each.top[0].rank:
        return each.top
    return [each.chosen, *(token for token in each.top if token.token_id != each.chosen.token_id)]


def _name(token: pb.TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else text_of(token)
