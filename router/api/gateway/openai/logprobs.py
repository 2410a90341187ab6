"""The JSON of logprobs, in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2 as pb


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


def echoed_logprobs(
    first: pb.TokenLogprob, logprobs: Sequence[pb.TokenLogprobs], num_top: int, *, as_ids: bool
) -> dict[str, Any]:
    """Returns those of a whole prompt. first: its first token, which nothing precedes. logprobs: of the others."""
    shown = completion_logprobs(logprobs, len(text_of(first)), as_ids=as_ids)
    top = [{_name(top, as_ids): top.logprob for top in each.top[:num_top]} for each in logprobs]
    return {
        "tokens": [_name(first, as_ids), *shown["tokens"]],
        "token_logprobs": [None, *shown["token_logprobs"]],
        "top_logprobs": [None, *top],
        "text_offset": [0, *shown["text_offset"]],
    }


def prompt_logprobs(logprobs: Sequence[pb.TokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's list: for each token of a prompt but the first, {token id: {logprob, rank, decoded_token}}."""

    def one(each: pb.TokenLogprobs) -> dict[str, Any]:
        shown = [each.chosen, *each.top[:num_top]]
        return {
            str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": text_of(token)}
            for token in shown
        }

    return [None, *map(one, logprobs)]


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
