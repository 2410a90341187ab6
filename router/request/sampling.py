"""Ranges of the sampling parameters, and the values of those that a client left open."""

import os
from collections.abc import Sequence

from configs.sampling import FROM_MODEL, LARGEST_LOGIT_BIAS, MAX_CHOICES, MAX_LOGIT_BIAS, out_of_range
from protos.inference_pb2 import ModelInfo, SamplingParams
from router.errors import InvalidRequest
from router.request.values import check_prompt_length, check_token_ids


def check(sampling: SamplingParams) -> None:
    """Raises InvalidRequest."""
    if (wrong := out_of_range(sampling)) is not None:
        parameter, value = wrong
        shown = f"{value:g}" if parameter.kind is float else value
        raise InvalidRequest(f"sampling.{parameter.name}={shown}: use {parameter.what_works}")
    if sampling.n > MAX_CHOICES:
        raise InvalidRequest(f"sampling.n={sampling.n}: use 1 to {MAX_CHOICES}")
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens < 1:
            raise InvalidRequest("sampling.max_tokens=0: use at least 1, or leave it unset")
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"sampling.min_tokens={sampling.min_tokens}: use at most max_tokens, which is {sampling.max_tokens}"
            )
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"sampling.logit_bias has {len(sampling.logit_bias)} entries: use at most {MAX_LOGIT_BIAS}"
        )
    for token_id, bias in sampling.logit_bias.items():
        if not abs(bias) <= LARGEST_LOGIT_BIAS:
            raise InvalidRequest(
                f"sampling.logit_bias[{token_id}]={bias:g}: use a number in "
                f"[-{LARGEST_LOGIT_BIAS}, {LARGEST_LOGIT_BIAS}]"
            )


def check_against_model(sampling: SamplingParams, prompt_token_ids: Sequence[int], model: ModelInfo) -> None:
    """Checks what depends on the model and the prompt's length. sampling: as requested. Raises InvalidRequest."""
    num_prompt_tokens = len(prompt_token_ids)
    check_prompt_length(num_prompt_tokens, model)
    room = model.max_model_len - num_prompt_tokens
    if sampling.HasField("max_tokens") and sampling.max_tokens > room:
        raise InvalidRequest(
            f"sampling.max_tokens={sampling.max_tokens} after a prompt of {num_prompt_tokens} tokens goes beyond "
            f"max_model_len={model.max_model_len}: use at most {room}, or leave it unset"
        )
    if sampling.min_tokens > room:
        raise InvalidRequest(
            f"sampling.min_tokens={sampling.min_tokens}: this prompt leaves room for {room}; use at most that"
        )
    check_token_ids("token_ids.ids", prompt_token_ids, model.vocab_size)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    check_token_ids("sampling.logit_bias", list(sampling.logit_bias), model.vocab_size)
    check_token_ids("sampling.logprob_token_ids", sampling.logprob_token_ids, model.vocab_size)


def fill_in_defaults(sampling: SamplingParams, model: ModelInfo, num_prompt_tokens: int) -> None:
    """Sets every number that a client left open, so that a resume leaves nothing to a default.

    sampling: checked, and changed in place. num_prompt_tokens: below max_model_len.
    """
    for parameter in FROM_MODEL:
        if not parameter.given_in(sampling):
            setattr(sampling, parameter.name, parameter.value_in(model.default_sampling))
    sampling.top_k = max(sampling.top_k, 0)
    sampling.n = sampling.n or 1
    if not sampling.HasField("seed"):
        sampling.seed = pick_seed()
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = model.max_model_len - num_prompt_tokens
    if not sampling.HasField("skip_special_tokens"):
        sampling.skip_special_tokens = True


def pick_seed() -> int:
    """A random seed of 63 bits: languages without unsigned 64-bit integers can hold it."""
    return int.from_bytes(os.urandom(8)) >> 1
