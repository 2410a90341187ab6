"""Prompts with a suffix: the output fills the gap between two texts."""

from protos.inference_pb2 import GenerateRequest, SamplingParams
from router.errors import InvalidRequest
from router.request.features import stops
from router.text.fill_in import FillIn
from router.text.tokenizer import Tokenizer


def check(message: GenerateRequest) -> None:
    """Raises InvalidRequest. message: with a suffix."""
    if message.WhichOneof("input") != "prompt":
        raise InvalidRequest(f"suffix has {len(message.suffix)} characters: it needs prompt as text")


def form_of(message: GenerateRequest, tokenizer: Tokenizer) -> FillIn:
    """Returns how the model's prompts with a suffix are written. Raises InvalidRequest if it knows none."""
    if tokenizer.fill_in is None:
        raise InvalidRequest(
            f"suffix has {len(message.suffix)} characters, but this model's tokenizer has no tokens for filling in "
            "the middle: leave it out"
        )
    return tokenizer.fill_in


def resolve(message: GenerateRequest, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
    """Adds the tokens that end a filled middle. Raises InvalidRequest."""
    stops.add(sampling, form_of(message, tokenizer).stop_token_ids)
