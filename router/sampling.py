"""Resolves sampling parameters: what the request says, else the model's generation_config.json, else a default."""

import os

from protos.inference_pb2 import SamplingParams

# As stated in protos/inference.proto.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def pick_seed() -> int:
    """A random seed of 63 bits: languages without unsigned 64-bit integers can hold it."""
    return int.from_bytes(os.urandom(8)) >> 1


def resolve_sampling(
    requested: SamplingParams, model_default: SamplingParams, *, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """A copy with every field filled in that applies; nothing in it is left to a default on a resume.

    requested: validated (router.validation). num_prompt_tokens: below max_model_len.
    """
    resolved = SamplingParams()
    resolved.CopyFrom(requested)
    for name, default in _DEFAULTS.items():
        if not resolved.HasField(name):
            setattr(resolved, name, getattr(model_default, name) if model_default.HasField(name) else default)
    resolved.top_k = max(resolved.top_k, 0)
    resolved.n = resolved.n or 1
    if not resolved.HasField("seed"):
        resolved.seed = pick_seed()
    if not resolved.HasField("max_tokens"):
        resolved.max_tokens = max_model_len - num_prompt_tokens
    if not resolved.HasField("skip_special_tokens"):
        resolved.skip_special_tokens = True
    return resolved


def for_scheduler(resolved: SamplingParams) -> SamplingParams:
    """The copy that travels in Submit: stop strings stay with the router, which alone knows text."""
    sampling = SamplingParams()
    sampling.CopyFrom(resolved)
    del sampling.stop[:]
    return sampling
