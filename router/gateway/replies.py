"""From a stream's events to the JSON that OpenAI's clients read."""

from collections.abc import Iterable, Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.errors import Internal

_FINISHES = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def finish_of(chunk: pb.Chunk) -> str | None:
    """None: more comes. Raises Internal for an end that no client should take for one."""
    if not chunk.HasField("finish"):
        return None
    reason = chunk.finish.reason
    if reason not in _FINISHES:
        raise Internal(f"the output ended early: {pb.FinishReason.Name(reason)}")
    return _FINISHES[reason]


def usage_of(usages: Iterable[pb.Usage]) -> dict[str, Any]:
    usages = list(usages)
    prompt, completion = sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
    }


def chat_logprobs(logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
    def one(token: pb.TokenLogprob) -> dict[str, Any]:
        return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.token)}

    return {"content": [{**one(each.chosen), "top_logprobs": [one(top) for top in each.top]} for each in logprobs]}


def completion_logprobs(logprobs: Sequence[pb.TokenLogprobs], text_offset: int) -> dict[str, Any]:
    """text_offset: characters of the choice before these tokens."""
    tokens, offsets = [_text(each.chosen) for each in logprobs], []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [each.chosen.logprob for each in logprobs],
        "top_logprobs": [{_text(top): top.logprob for top in each.top} for each in logprobs],
        "text_offset": offsets,
    }


def _text(token: pb.TokenLogprob) -> str:
    """Of a token that is no whole characters, with marks in the place of what is missing."""
    return token.token.decode(errors="replace")
