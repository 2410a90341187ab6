"""Requests that continue what another stream began."""

import asyncio

from protos.inference_pb2 import GenerateRequest, Resume
from router.errors import InvalidRequest
from router.request.values import check_token_ids
from router.streams.choices import SLICE_TOKENS
from router.text.tokenizer_pool import listed

# Submit.attempt holds 16 bits of it; see router.streams.placement.
MAX_ATTEMPT = 2**16 - 1


def check(message: GenerateRequest) -> None:
    """Checks all that can be checked without the model. Raises InvalidRequest."""
    resume, sampling = message.resume, message.sampling
    if not 1 <= resume.attempt <= MAX_ATTEMPT:
        raise InvalidRequest(f"resume.attempt={resume.attempt}: use Started.attempt + 1, at most {MAX_ATTEMPT}")
    if not resume.prompt_token_ids:
        raise InvalidRequest("resume.prompt_token_ids is empty: give Started.prompt_token_ids")
    for name in ("seed", "max_tokens"):
        if not sampling.HasField(name):
            raise InvalidRequest(f"sampling.{name} is unset: a resume takes Started.sampling as it is")
    num_choices = max(sampling.n, 1)
    seen: set[int] = set()
    for i, choice in enumerate(resume.choices):
        field = f"resume.choices[{i}]"
        if choice.index >= num_choices:
            raise InvalidRequest(
                f"{field}.index={choice.index}: sampling.n={num_choices} has choices 0 to {num_choices - 1}"
            )
        if choice.index in seen:
            raise InvalidRequest(f"{field}.index={choice.index} comes twice: give each choice once")
        seen.add(choice.index)
        if len(choice.output_token_ids) > sampling.max_tokens:
            raise InvalidRequest(
                f"{field}.output_token_ids has {len(choice.output_token_ids)} tokens: "
                f"sampling.max_tokens={sampling.max_tokens} allows no more than that"
            )


async def check_tokens(resume: Resume, vocab_size: int) -> None:
    """Checks the tokens that it brings, with pauses for an event loop. Raises InvalidRequest."""
    for i, choice in enumerate(resume.choices):
        field = f"resume.choices[{i}].output_token_ids"
        check_token_ids(field, await listed(choice.output_token_ids), vocab_size)
        if len(choice.output_token_ids) > SLICE_TOKENS:
            await asyncio.sleep(0)
