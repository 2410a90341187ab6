"""A model without weights: the next token is a pure function of the tokens before it, the seed and the choice.

So the expected output of a request is known without any scheduling. The KV of a position is the digest of the prefix
that ends there, so a read of a wrong slot is detected.
"""

from dataclasses import dataclass

from scheduler.core.messages import FinishReason, GroupRequest, RepetitionRule, StopRules
from tests.fakes.items import with_embeddings

VOCAB_SIZE = 13
# The part of a digest that holds the last token.
_TOKEN = 0xFFFF
# Begins what is hashed for the number of forced tokens. Hashes of numbers are the same in every process.
_FORCED = 7_919


@dataclass(frozen=True, slots=True)
class FakeSampling:
    """The sampling parameters that plans carry for the fake worker.

    scope: stands for the cache salt; scopes share no KV. seed: tokens depend on it, KV does not.
    """

    scope: int = 0
    seed: int = 0
    has_logprobs: bool = False
    # Now and then the next tokens are known: the worker proposes them.
    is_constrained: bool = False
    # Most tokens follow from the one before, as in a text that repeats itself.
    is_predictable: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A sequence's whole output."""

    token_ids: list[int]
    reason: FinishReason
    stop_token_id: int | None


def extend_digest(digest: int, token_id: int) -> int:
    """The digest of a prefix, from the digest of the prefix one token shorter. The digest of no tokens is the scope.

    It ends with the last token.
    """
    return (hash((digest, token_id)) & ~_TOKEN) | (token_id & _TOKEN)


def next_token(digest: int, sampling: FakeSampling, choice: int) -> int:
    """The token after a prefix. It differs between seeds and choices, as if sampled."""
    drawn = hash((sampling.seed, choice, digest))
    if sampling.is_predictable and drawn // VOCAB_SIZE % 6:
        return ((digest & _TOKEN) + 1) % VOCAB_SIZE
    return drawn % VOCAB_SIZE


def num_forced(digest: int) -> int:
    """How many tokens after a prefix are the only possible ones, for a sequence with a constraint."""
    return max(hash((_FORCED, digest)) % 12 - 6, 0)


def logprobs_of(token_id: int) -> object:
    """The logprobs of a token, for requests that ask for them."""
    return ("logprobs of", token_id)


def repeats_itself(tokens: list[int], rule: RepetitionRule) -> bool:
    """The definition of repetition_detection."""
    for length in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        size = length * rule.min_count
        if len(tokens) >= size and tokens[-size:] == tokens[-length:] * rule.min_count:
            return True
    return False


def generate(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    choice: int,
    stop: StopRules,
    eos: frozenset[int] = frozenset(),
    sampling: FakeSampling = FakeSampling(),
) -> Output:
    """The whole output of a sequence that begins with `output`, computed without any scheduling."""
    digest, tokens = sampling.scope, list(output)
    for token_id in prompt + output:
        digest = extend_digest(digest, token_id)
    while True:
        if tokens and len(tokens) >= stop.min_tokens:
            last = tokens[-1]
            if last in stop.stop_token_ids:
                return Output(tokens, FinishReason.STOP, last)
            if last in eos and not stop.ignore_eos:
                return Output(tokens, FinishReason.STOP, None)
        if len(tokens) >= stop.max_tokens:
            return Output(tokens, FinishReason.LENGTH, None)
        if tokens and len(tokens) >= stop.min_tokens and stop.repetition and repeats_itself(tokens, stop.repetition):
            return Output(tokens, FinishReason.REPETITION, None)
        tokens.append(next_token(digest, sampling, choice))
        digest = extend_digest(digest, tokens[-1])


def outputs_alone(request: GroupRequest, eos: frozenset[int] = frozenset()) -> dict[int, Output]:
    """The expected output of each choice of a request, by choice."""
    sampling = request.sampling
    assert isinstance(sampling, FakeSampling)
    prompt = with_embeddings(request.prompt_token_ids, request.items)
    return {
        start.choice: generate(prompt, start.output_token_ids, start.choice, request.stop, eos, sampling)
        for start in request.choices
    }
