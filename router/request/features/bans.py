"""Turns bad_words into token sequences, and checks that they and allowed_token_ids leave tokens to choose from."""

from collections.abc import Sequence

from configs.sampling import MAX_ALLOWED_TOKENS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_CHARS
from protos.inference_pb2 import GenerateRequest, ModelInfo, SamplingParams, TokenIds
from router.errors import InvalidRequest
from router.request.values import check_token_ids

FIELDS = frozenset({"allowed_token_ids", "bad_words", "bad_word_token_ids"})

_Sequences = Sequence[Sequence[int]]


def check(message: GenerateRequest) -> None:
    """Checks all that can be checked without the model. Raises InvalidRequest."""
    sampling = message.sampling
    if (count := len(sampling.allowed_token_ids)) > MAX_ALLOWED_TOKENS:
        raise InvalidRequest(f"sampling.allowed_token_ids has {count} entries: use at most {MAX_ALLOWED_TOKENS}")
    for name in ("bad_words", "bad_word_token_ids"):
        if (count := len(getattr(sampling, name))) > MAX_BAD_WORDS:
            raise InvalidRequest(f"sampling.{name} has {count} entries: use at most {MAX_BAD_WORDS}")
    for i, word in enumerate(sampling.bad_words):
        if not 1 <= len(word) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"sampling.bad_words[{i}] has {len(word)} characters: use 1 to {MAX_STOP_CHARS}")
    for i, each in enumerate(sampling.bad_word_token_ids):
        if not each.ids:
            raise InvalidRequest(f"sampling.bad_word_token_ids[{i}] is empty: give at least one token")
        if (count := len(each.ids)) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"sampling.bad_word_token_ids[{i}] has {count} tokens: use at most {MAX_BAD_WORD_TOKENS} in all"
            )


def resolve(sampling: SamplingParams, of_words: Sequence[_Sequences], model: ModelInfo) -> None:
    """Adds the sequences of bad_words to bad_word_token_ids, each once, and checks what is left to choose from.

    sampling: changed in place. of_words: of each of its bad_words (router.text.tokenizer). Raises InvalidRequest.
    """
    for i, of_word in enumerate(of_words):
        if not of_word:
            raise InvalidRequest(f"sampling.bad_words[{i}] is a word without tokens: use one that the tokenizer knows")
    if sampling.bad_word_token_ids or of_words:
        given = [tuple(each.ids) for each in sampling.bad_word_token_ids]
        for i, sequence in enumerate(given):
            check_token_ids(f"sampling.bad_word_token_ids[{i}].ids", sequence, model.vocab_size)
        sequences = dict.fromkeys([*given, *(tuple(each) for of_word in of_words for each in of_word)])
        name = "bad_words" if of_words else "bad_word_token_ids"
        if len(sequences) > MAX_BAD_WORDS:
            raise InvalidRequest(f"sampling.{name} has {len(sequences)} token sequences: use at most {MAX_BAD_WORDS}")
        if (num_tokens := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(f"sampling.{name} has {num_tokens} tokens in all: use at most {MAX_BAD_WORD_TOKENS}")
        del sampling.bad_words[:]
        del sampling.bad_word_token_ids[:]
        sampling.bad_word_token_ids.extend(TokenIds(ids=sequence) for sequence in sequences)
    if sampling.allowed_token_ids:
        check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, model.vocab_size)
        _check_tokens_left(sampling, model)


def _check_tokens_left(sampling: SamplingParams, model: ModelInfo) -> None:
    """Refuses a choice that could come to a position without tokens to choose from. Raises InvalidRequest."""
    left = set(sampling.allowed_token_ids)
    if sampling.min_tokens:
        left.difference_update(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            left.difference_update(model.eos_token_ids)
        if not left:
            raise InvalidRequest(
                f"sampling.allowed_token_ids has only tokens that end the output, and min_tokens={sampling.min_tokens} "
                "forbids those: allow another one, or leave min_tokens out"
            )
    left.difference_update(each.ids[-1] for each in sampling.bad_word_token_ids)
    if not left:
        raise InvalidRequest(
            "sampling.allowed_token_ids has only tokens that may be forbidden by bad_words or min_tokens: allow one "
            "that never is"
        )
