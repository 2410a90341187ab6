"""Bounds of allowed_token_ids and bad_words, and requests that could be left without a token to choose."""

import pytest

from configs.sampling import MAX_ALLOWED_TOKENS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from protos.inference_pb2 import GenerateRequest, ModelInfo, SamplingParams, TokenIds
from router.errors import InvalidRequest
from router.request.features import bans

MODEL = ModelInfo(vocab_size=100, eos_token_ids=[2])


def ids(*sequences: list[int]) -> list[TokenIds]:
    return [TokenIds(ids=each) for each in sequences]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            {"allowed_token_ids": [5] * (MAX_ALLOWED_TOKENS + 1)},
            r"allowed_token_ids has 1025 entries: use at most 1024",
        ),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, r"bad_words has 129 entries: use at most 128"),
        ({"bad_words": ["a", ""]}, r"bad_words\[1\] has 0 characters"),
        ({"bad_word_token_ids": ids([5], [])}, r"bad_word_token_ids\[1\] is empty"),
        # Before they are compared with each other, which takes time for each.
        (
            {"bad_word_token_ids": ids([5], [5] * (MAX_BAD_WORD_TOKENS + 1))},
            r"bad_word_token_ids\[1\] has 1025 tokens: use at most 1024 in all",
        ),
    ],
)
def test_lists_are_bounded(sampling: dict, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{words}"):
        bans.check(GenerateRequest(sampling=SamplingParams(**sampling)))


@pytest.mark.parametrize(
    ("sampling", "of_words", "words"),
    [
        ({"allowed_token_ids": [5, 100]}, (), r"allowed_token_ids\[1\]=100: token ids of this model are 0 to 99"),
        ({"bad_word_token_ids": ids([5, 100])}, (), r"bad_word_token_ids\[0\]\.ids\[1\]=100"),
        ({"bad_words": ["a", " "]}, [[[5]], []], r"bad_words\[1\] is a word without tokens"),
        ({"bad_words": ["a"]}, [[[n]] for n in range(129)], r"bad_words has 129 token sequences: use at most 128"),
        ({"bad_words": ["a"]}, [[[5] * (MAX_BAD_WORD_TOKENS + 1)]], r"bad_words has 1025 tokens in all"),
        (
            {"allowed_token_ids": [2, 7], "min_tokens": 1, "stop_token_ids": [7]},
            (),
            "allowed_token_ids has only tokens",
        ),
        (
            {"allowed_token_ids": [7], "bad_word_token_ids": ids([5, 7])},
            (),
            "allowed_token_ids has only tokens that may",
        ),
    ],
)
def test_a_request_is_refused_by_the_name_of_what_is_wrong(sampling: dict, of_words: list, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{words}"):
        bans.resolve(SamplingParams(**sampling), of_words, MODEL)


def test_words_become_sequences_once_each() -> None:
    """The fields that a resume brings back stay as they are."""
    sampling = SamplingParams(
        bad_words=["a", "b"], bad_word_token_ids=ids([5, 6]), allowed_token_ids=[2, 9], min_tokens=1
    )
    bans.resolve(sampling, [[[7], [8]], [[5, 6], [7]]], MODEL)
    expected = SamplingParams(bad_word_token_ids=ids([5, 6], [7], [8]), allowed_token_ids=[2, 9], min_tokens=1)
    assert sampling == expected
    bans.resolve(sampling, (), MODEL)
    assert sampling == expected
