"""Prompts that are cut to a number of tokens."""

from protos.inference_pb2 import TRUNCATION_SIDE_RIGHT, GenerateRequest
from router.errors import InvalidRequest
from router.request.media.prompts import Prompt, cut


def check(message: GenerateRequest) -> None:
    """Raises InvalidRequest. message: with truncate_prompt_tokens."""
    if message.suffix:
        raise InvalidRequest(
            f"suffix has {len(message.suffix)} characters, and truncate_prompt_tokens is set: use one of them"
        )


def truncated(prompt: Prompt, message: GenerateRequest, max_model_len: int) -> Prompt:
    """Returns the tokens of a prompt that truncate_prompt_tokens keeps, without an item that it would cut in two."""
    most, num_tokens = message.truncate_prompt_tokens, len(prompt.token_ids)
    if not most:
        reserved = message.sampling.max_tokens if message.sampling.HasField("max_tokens") else 1
        most = max(max_model_len - reserved, 1)
    if num_tokens <= most:
        return prompt
    if message.truncation_side == TRUNCATION_SIDE_RIGHT:
        return cut(prompt, 0, most)
    return cut(prompt, num_tokens - most, num_tokens)
