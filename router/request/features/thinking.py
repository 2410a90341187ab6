"""Bounds the reasoning of an output: says where it begins and ends, and with which tokens its end is enforced."""

from collections.abc import Callable

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.parsing.parser import OutputFormat
from router.request.values import check_token_ids
from router.text.tokenizer import Tokenizer

FIELDS = frozenset({"thinking_token_budget", "reasoning_marks"})
_FIELD = "sampling.thinking_token_budget"
_MARKS = "sampling.reasoning_marks"
_MAX_MARKS, _MAX_MARK_BYTES, _MAX_END_TOKENS = 16, 256, 64


def resolve(
    message: pb.GenerateRequest,
    sampling: pb.SamplingParams,
    form: OutputFormat,
    tokenizer: Tokenizer,
    prompt_end: Callable[[], str],
) -> None:
    """Fills in the marks of a new request with a budget. Without reasoning in its output there are none.

    sampling: changed in place. form: the served model's. prompt_end: returns the text of the prompt's last tokens.
    Raises InvalidRequest.
    """
    sampling.ClearField("reasoning_marks")
    if not sampling.HasField("thinking_token_budget"):
        return
    if not form.has_reasoning:
        raise InvalidRequest(
            f"{_FIELD}={sampling.thinking_token_budget}: no format of reasoning is known of this model; leave it out, "
            "or start the router with reasoning_parser"
        )
    marks = form.reasoning_marks(message.chat, prompt_end())
    after = sampling.constraint.after
    # A constraint that begins at once leaves no room for reasoning. In harmony, channels are a part of the grammar.
    if marks is None or (sampling.HasField("constraint") and not after and not form.is_harmony):
        return
    text = form.enforced_end(marks, message.chat, after)
    marks.end_token_ids.extend(tokenizer.encode_continuation(text))
    written = tokenizer.decode(marks.end_token_ids, skip_special_tokens=False)
    if not any(end in written for end in marks.ends):
        raise InvalidRequest(f"{_FIELD} is set, and this model's tokenizer can't write {text!r}: leave it out")
    sampling.reasoning_marks.CopyFrom(marks)


def check_resumed(sampling: pb.SamplingParams) -> None:
    """Checks what a resume brings. Raises InvalidRequest."""
    if not sampling.HasField("reasoning_marks"):
        return
    marks = sampling.reasoning_marks
    texts = [*marks.begins, *marks.ends]
    if not sampling.HasField("thinking_token_budget"):
        raise InvalidRequest(f"{_MARKS} is set without thinking_token_budget: a resume takes Started.sampling as it is")
    if len(texts) > _MAX_MARKS or not all(1 <= len(text.encode()) <= _MAX_MARK_BYTES for text in texts):
        raise InvalidRequest(
            f"{_MARKS} has {len(texts)} texts: use at most {_MAX_MARKS}, of 1 to {_MAX_MARK_BYTES} bytes"
        )
    if not 1 <= len(marks.end_token_ids) <= _MAX_END_TOKENS:
        raise InvalidRequest(
            f"{_MARKS}.end_token_ids has {len(marks.end_token_ids)} entries: use 1 to {_MAX_END_TOKENS}"
        )


def check_against_model(sampling: pb.SamplingParams, model: pb.ModelInfo) -> None:
    """Checks that the tokens of the end can be drawn. Raises InvalidRequest."""
    enforced = sampling.reasoning_marks.end_token_ids
    check_token_ids(f"{_MARKS}.end_token_ids", enforced, model.vocab_size)
    allowed = frozenset(sampling.allowed_token_ids)
    if allowed and (missing := [token_id for token_id in enforced if token_id not in allowed]):
        raise InvalidRequest(
            f"{_FIELD} is set, and allowed_token_ids lacks token {missing[0]}, with which the reasoning ends: allow it"
        )
