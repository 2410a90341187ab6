"""Logprobs beside tokens: how many, or of which tokens."""

from configs.sampling import ALL_LOGPROBS, MAX_LOGPROB_TOKENS
from protos.inference_pb2 import GenerateRequest, SamplingParams
from router.errors import InvalidRequest

FIELDS = frozenset({"logprobs", "prompt_logprobs", "logprob_token_ids"})


def check(message: GenerateRequest) -> None:
    """Raises InvalidRequest."""
    sampling = message.sampling
    listed = sampling.logprob_token_ids
    if len(listed) > MAX_LOGPROB_TOKENS:
        raise InvalidRequest(f"sampling.logprob_token_ids has {len(listed)} entries: use at most {MAX_LOGPROB_TOKENS}")
    if listed and sampling.HasField("logprobs") and sampling.logprobs != len(set(listed)):
        raise InvalidRequest(
            f"sampling.logprobs={sampling.logprobs}: leave it unset, because logprob_token_ids says which ones"
        )


def resolve(sampling: SamplingParams, vocab_size: int, max_logprobs: int) -> int:
    """Counts listed tokens once, and puts numbers in the place of ALL_LOGPROBS. Returns the most logprobs that a
    replica must be able to return beside a token. max_logprobs: that of the replica that has most. Raises
    InvalidRequest."""
    if listed := list(dict.fromkeys(sampling.logprob_token_ids)):
        sampling.logprob_token_ids[:] = listed
        sampling.logprobs = len(listed)
    most = 0
    for name in ("prompt_logprobs",) if listed else ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count == ALL_LOGPROBS:
            if vocab_size > max_logprobs:
                raise InvalidRequest(
                    f"sampling.{name}=-1 asks for all {vocab_size} tokens: max_logprobs={max_logprobs} allows 0 to "
                    f"{max_logprobs}"
                )
            count = vocab_size
            setattr(sampling, name, count)
        if count > max_logprobs:
            raise InvalidRequest(f"sampling.{name}={count}: use 0 to {max_logprobs}, the option max_logprobs")
        most = max(most, count)
    return most
