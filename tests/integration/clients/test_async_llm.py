"""`octavo.AsyncLLM`: many streams at once, some of which end early, and the outputs of `octavo.LLM`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from octavo import (
    LLM,
    AsyncLLM,
    Constraint,
    DuplicateRequest,
    FinishReason,
    Generation,
    InvalidRequest,
    SamplingParams,
)
from tests.fakes.routers import smollm2_tokenizer
from tests.support.models.tiny_model import make_tiny_model

OPTIONS = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 0.01, "worker_threads": 1, "max_num_seqs": 16}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
NUM_REQUESTS = 32


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 7 + place) % 90 for place in range(4 + number % 5)]


def sampling_of(number: int) -> SamplingParams:
    tokens, choices = 40 + number % 7, 1 + number % 3
    return SamplingParams(temperature=0.9 * (number % 2), seed=number, n=choices, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[Generation]:
    numbers = range(NUM_REQUESTS)
    return LLM(str(model), **OPTIONS).generate([prompt_of(n) for n in numbers], [sampling_of(n) for n in numbers])


@pytest.fixture
async def llm(model: Path) -> AsyncIterator[AsyncLLM]:
    # Its words are not made of bytes, which grammars need: the first tokens of SmolLM2 are.
    tokenizer = str(smollm2_tokenizer().directory)
    async with AsyncLLM(str(model), tokenizer=tokenizer, **OPTIONS) as llm:
        yield llm


async def last(outputs: AsyncIterator[Generation]) -> Generation:
    [*_, found] = [output async for output in outputs]
    return found


async def begun(outputs: AsyncIterator[Generation]) -> Generation:
    return await anext(outputs)


async def check_streams(llm: AsyncLLM, expected: Sequence[Generation]) -> None:
    """Streams all requests. Of each three, one is left early, and one of each nine is aborted by its id."""

    async def one(number: int) -> Generation:
        outputs = llm.generate(prompt_of(number), sampling_of(number), request_id=f"r{number}")
        found = await anext(outputs)
        if number % 9 == 0:
            await llm.abort(["r-unknown", f"r{number}"])
        elif number % 3 == 0:
            await outputs.aclose()
        async for output in outputs:
            for before, now in zip(found.choices, output.choices, strict=True):
                assert before.token_ids == now.token_ids[: len(before.token_ids)]
            found = output
        return found

    results = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    for number, (result, whole) in enumerate(zip(results, expected, strict=True)):
        pairs = list(zip(result.choices, whole.choices, strict=True))
        if number % 3:
            assert [found.token_ids for found, _ in pairs] == [choice.token_ids for _, choice in pairs]
            assert result.finished
            assert result.usage is not None
        else:
            assert all(found.token_ids == choice.token_ids[: len(found.token_ids)] for found, choice in pairs)
            assert sum(len(found.token_ids) for found, _ in pairs) < sum(len(choice.token_ids) for _, choice in pairs)
        if number % 9 == 0:
            assert {found.finish_reason for found, _ in pairs} == {FinishReason.CANCELLED}
            assert result.finished


async def test_streams_say_what_llm_says_also_beside_streams_that_end_early(
    llm: AsyncLLM, expected: Sequence[Generation]
) -> None:
    await check_streams(llm, expected)
    again = await last(llm.generate(prompt_of(1), sampling_of(1)))
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in expected[1].choices]


async def test_two_replicas_stream_the_same(model: Path, expected: Sequence[Generation]) -> None:
    async with AsyncLLM(str(model), **OPTIONS, data_parallel_size=2) as llm:
        await check_streams(llm, expected)
        with pytest.raises(InvalidRequest, match="max_tokens=1000"):
            await last(llm.generate([5, 6], SamplingParams(max_tokens=1000)))
        with pytest.raises(InvalidRequest, match="a prompt is text, messages or token ids"):
            await last(llm.generate([-1], LONG))
        outputs = llm.generate([5, 6], LONG)
        await begun(outputs)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(RuntimeError, match="shut down"):
            await last(outputs)


async def test_chats_searches_and_constraints(llm: AsyncLLM) -> None:
    template = "{{ messages[0].content }}"
    yes_or_no = SamplingParams(max_tokens=20, constraint=Constraint(choice=["YES", "NO"]))
    answer = await last(llm.chat("!", yes_or_no, chat_template=template))
    assert answer.text in ("YES", "NO")
    beams = await last(llm.generate([20], SamplingParams(max_tokens=4, n=2), beam_width=2))
    assert len(beams.choices) == 2
    search = llm.generate([20], LONG, beam_width=2, request_id="beams")
    ending = asyncio.ensure_future(last(search))
    # It is in the engine once another one, submitted later, has an answer.
    await last(llm.generate([21], SamplingParams(max_tokens=1)))
    await llm.abort("beams")
    assert {choice.finish_reason for choice in (await ending).choices} == {FinishReason.CANCELLED}


async def test_errors_are_those_of_their_request(llm: AsyncLLM) -> None:
    running = llm.generate([5, 6], LONG, request_id="a")
    await begun(running)
    with pytest.raises(DuplicateRequest, match="request_id='a'"):
        await last(llm.generate([5, 6], LONG, request_id="a"))
    with pytest.raises(InvalidRequest, match="max_tokens=1000"):
        await last(llm.generate([5, 6], SamplingParams(max_tokens=1000)))
    assert len((await last(running)).choices[0].token_ids) == 150
    assert (await last(llm.generate([5, 6], LONG, request_id="a"))).finished


async def test_a_task_that_is_cancelled_ends_its_request(llm: AsyncLLM) -> None:
    task = asyncio.create_task(last(llm.generate([5, 6], LONG, request_id="a")))
    await begun(llm.generate([5, 7], LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await last(llm.generate([5, 6], LONG, request_id="a"))).finished


async def test_what_runs_at_the_shutdown_fails(model: Path) -> None:
    llm = AsyncLLM(str(model), **OPTIONS)
    outputs = llm.generate([5, 6], LONG)
    await begun(outputs)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        await last(outputs)
    with pytest.raises(RuntimeError, match="shut down"):
        await last(llm.generate([5, 6], LONG))
    llm.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-")]
