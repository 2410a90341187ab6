"""Stop strings, and the tokens that end an output."""

from configs.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKENS
from protos.inference_pb2 import GenerateRequest, SamplingParams
from router.errors import InvalidRequest

FIELDS = frozenset({"stop", "stop_token_ids"})


def check(message: GenerateRequest) -> None:
    """Raises InvalidRequest."""
    sampling = message.sampling
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"sampling.stop has {len(sampling.stop)} entries: use at most {MAX_STOP_STRINGS}")
    for i, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"sampling.stop[{i}] has {len(stop)} characters: use 1 to {MAX_STOP_CHARS}")
    _check_tokens(sampling)


def add(sampling: SamplingParams, token_ids: tuple[int, ...]) -> None:
    """Adds tokens that end the output. Raises InvalidRequest."""
    sampling.stop_token_ids.extend([token_id for token_id in token_ids if token_id not in sampling.stop_token_ids])
    _check_tokens(sampling)


def _check_tokens(sampling: SamplingParams) -> None:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"sampling.stop_token_ids has {len(sampling.stop_token_ids)} entries: use at most {MAX_STOP_TOKENS}"
        )
