"""Checks a beam search that a client asks for. Every message names the field, the value seen and what would work."""

from configs.sampling import LARGEST_LENGTH_PENALTY, MAX_BEAM_WIDTH
from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from runtime.wire import SESSION_PART_TOKENS

# Fields of `sampling` that a search heeds, and those that say how a token is drawn, which it does not do.
_HEEDED = {"n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs"}
_ABOUT_DRAWING = {"temperature", "top_p", "top_k", "min_p", "top_n_sigma", "seed"}
_KNOWN = _HEEDED | _ABOUT_DRAWING | {"skip_special_tokens", "num_speculative_tokens"}
# Fields to use in place of others.
_ADVICE = {"stop": "use stop_token_ids", "repetition_penalty": "use 1, or leave it unset"}


def num_streams(message: pb.GenerateRequest) -> int:
    """Streams for which a request counts: a search, which need not be valid, computes a token for each beam."""
    return min(max(message.beam_search.width, 1), MAX_BEAM_WIDTH)


def check(message: pb.GenerateRequest) -> None:
    """Checks all that can be checked without the model. message: with a beam_search. Raises InvalidRequest."""
    search, sampling = message.beam_search, message.sampling
    if message.parse_output:
        raise InvalidRequest("parse_output and beam_search are set: outputs of a search are not parsed; use one")
    if not 1 <= search.width <= MAX_BEAM_WIDTH:
        raise InvalidRequest(f"beam_search.width={search.width}: use 1 to {MAX_BEAM_WIDTH}")
    if sampling.n > search.width:
        raise InvalidRequest(f"sampling.n={sampling.n}: use at most beam_search.width, which is {search.width}")
    if not abs(search.length_penalty) <= LARGEST_LENGTH_PENALTY:
        raise InvalidRequest(
            f"beam_search.length_penalty={search.length_penalty:g}: use a number in "
            f"[-{LARGEST_LENGTH_PENALTY}, {LARGEST_LENGTH_PENALTY}]"
        )
    for field, value in sampling.ListFields():
        if field.name not in _KNOWN and not (field.name == "repetition_penalty" and value == 1):
            shown = f"={value:g}" if isinstance(value, int | float) else " is set"
            raise InvalidRequest(
                f"sampling.{field.name}{shown}: a beam search ranks outputs by the model's own logprobs; "
                f"{_ADVICE.get(field.name, 'leave it unset')}"
            )


def check_room(search: pb.BeamSearch, sampling: pb.SamplingParams, model: pb.ModelInfo) -> None:
    """Checks what depends on the model. sampling: resolved. Raises InvalidRequest."""
    most = SESSION_PART_TOKENS // search.width
    if sampling.max_tokens > most:
        # One message holds all beams.
        raise InvalidRequest(
            f"sampling.max_tokens={sampling.max_tokens} with beam_search.width={search.width}: use at most {most}, or "
            "a smaller width"
        )
    needed = num_needed(search, sampling, model)
    if needed > model.vocab_size:
        num_ends = needed - search.width
        raise InvalidRequest(
            f"beam_search.width={search.width}: this model has {model.vocab_size} tokens, {num_ends} of which may end "
            "an output; use a smaller width"
        )


def num_needed(search: pb.BeamSearch, sampling: pb.SamplingParams, model: pb.ModelInfo) -> int:
    """Returns the most tokens of which the logprobs are asked for at each position of a beam."""
    return search.width + len(sampling.stop_token_ids) + len(model.eos_token_ids)


def resolve(message: pb.GenerateRequest) -> pb.BeamSearch:
    """Returns a copy of the search with its default filled in."""
    given = message.beam_search
    return pb.BeamSearch(
        width=given.width, length_penalty=given.length_penalty if given.HasField("length_penalty") else 1
    )
