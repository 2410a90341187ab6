"""The room for answers that come whole: what is refused, who gets how much, and that all of it comes back."""

from typing import Any

import pytest

from configs.sampling import ALL_LOGPROBS
from protos.inference_pb2 import SamplingParams
from router.errors import InvalidRequest, RouterFull
from router.security.identity import Identity, set_caller
from router.streams.whole_answers import WholeAnswers

_MIB = 2**20


def _refusal(*asked: dict[str, Any], max_model_len: int = 0, **options: Any) -> str:
    answers = WholeAnswers(2**30)
    try:
        answers.begin([SamplingParams(**each) for each in asked], max_model_len, **options)
    except InvalidRequest as error:
        return str(error)
    return ""


def test_what_users_ask_for_passes() -> None:
    assert not _refusal({"n": 16, "max_tokens": 32_768})
    assert not _refusal({"n": 64, "max_tokens": 4000, "logprobs": 20})
    assert not _refusal(*[{"n": 1, "max_tokens": 4000, "logprobs": 5}] * 256)
    assert not _refusal({"n": 16, "max_tokens": 8000, "logprobs": 5}, is_message=True, max_bytes=32 * _MIB)


def test_an_answer_that_never_fits_is_refused_with_what_would_work() -> None:
    told = _refusal({"n": 64, "max_tokens": 8000, "logprobs": 20})
    for part in ("sampling.n=64", "max_tokens=8000", "logprobs=20", "10752000 logprobs", "8388608", "stream=true"):
        assert part in told
    assert _refusal({"n": 64, "max_tokens": 8000, "logprob_token_ids": list(range(20))})
    assert "of each of 256 prompts" in _refusal(*[{"n": 16, "max_tokens": 4000, "logprobs": 5}] * 256)
    assert _refusal({"n": 64, "max_tokens": 4000, "logprobs": 20}, is_message=True, max_bytes=32 * _MIB)


def test_what_is_refused_for_its_own_reason_or_not_known_yet_is_not_refused_here() -> None:
    assert not _refusal({"max_tokens": 2**31, "logprobs": 5}, max_model_len=2048)
    assert not _refusal({"n": 64, "logprobs": 20})
    assert not _refusal({"n": 64, "max_tokens": 2048, "logprobs": ALL_LOGPROBS})


async def test_callers_share_the_room_as_their_answers_grow() -> None:
    # In a task, so that no other test runs as this caller.
    answers = WholeAnswers(4 * _MIB)
    set_caller(Identity(tenant="one"))
    one = answers.begin((), 0)
    one.grow(60_000)
    assert answers.shared.total == 0, "small answers do not count"
    one.grow(_MIB)
    assert answers.shared.of("one") == 60_000 + _MIB
    set_caller(Identity(tenant="two"))
    two = answers.begin((), 0)
    two.grow(_MIB)
    with pytest.raises(RouterFull, match=r"max_answers_bytes=4194304: try again later .*stream=true") as full:
        two.grow(_MIB)
    assert full.value.retry_after_s
    one.shrink(_MIB)
    two.grow(0)
    two.close()
    two.close()
    assert (answers.shared.of("one"), answers.shared.of("two")) == (60_000, 0)
    one.close()
    assert answers.shared.total == 0


def test_an_answer_that_is_too_large_alone_is_not_worth_a_retry() -> None:
    answers = WholeAnswers(4 * _MIB)
    room = answers.begin((), 0)
    room.grow(2 * _MIB)
    with pytest.raises(InvalidRequest, match="more than 2097152 bytes"):
        room.grow(_MIB)
    room.settle(_MIB)
    assert answers.shared.total == _MIB
    room.close()
    assert answers.shared.total == 0
