"""Speculation at the edges: a request bounds it, and its usage tells of it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from octavo import AsyncClient, SamplingParams
from protos import inference_pb2 as pb
from router.request.features import beams
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.gateways import running_gateway

USER: Any = {"role": "user", "content": "How is the weather?"}


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def url(scheduler: FakeScheduler) -> AsyncIterator[str]:
    async with running_gateway(scheduler) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_request_bounds_it(client: openai.AsyncOpenAI, url: str, scheduler: FakeScheduler) -> None:
    more: Any = {"extra_body": {"num_speculative_tokens": 0}}
    await client.chat.completions.create(model="", messages=[USER], max_tokens=4, **more)
    await client.completions.create(model="", prompt="a", max_tokens=4, **more)
    await client.responses.create(model="", input="a", max_output_tokens=4, **more)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
        await claude.messages.create(model="test-model", max_tokens=4, messages=[USER], **more)
    asked = [submit.sampling for submit in scheduler.submitted]
    assert [each.num_speculative_tokens for each in asked if each.HasField("num_speculative_tokens")] == [0] * 4
    more = {"extra_body": {"num_speculative_tokens": 3}}
    await client.chat.completions.create(model="", messages=[USER], max_tokens=4, **more)
    await client.chat.completions.create(model="", messages=[USER], max_tokens=4)
    assert [submit.sampling.num_speculative_tokens for submit in scheduler.submitted[4:]] == [3, 0]
    assert not scheduler.submitted[-1].sampling.HasField("num_speculative_tokens")
    more = {"extra_body": {"num_speculative_tokens": -1}}
    with pytest.raises(openai.BadRequestError, match="num_speculative_tokens: Input should be greater than or equal"):
        await client.completions.create(model="", prompt="a", **more)


async def test_the_clients_of_grpc_bound_it_and_learn_of_it(scheduler: FakeScheduler) -> None:
    scheduler.drafts = (10, 6)
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        async with AsyncClient(f"localhost:{server.port}") as client:
            found = await client.generate("a", SamplingParams(max_tokens=4, n=2, num_speculative_tokens=5))
    assert scheduler.submitted[0].sampling.num_speculative_tokens == 5
    assert found.usage is not None
    assert (found.usage.draft_tokens, found.usage.accepted_draft_tokens) == (20, 12)


async def test_usage_counts_drafts_by_openais_names(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    fields: Any = {"model": "", "messages": [USER], "max_tokens": 4}
    plain: Any = await client.chat.completions.create(**fields)
    assert "accepted_prediction_tokens" not in plain.model_dump_json(exclude_none=True)
    scheduler.drafts = (10, 6)
    answer: Any = await client.chat.completions.create(**fields, n=2)
    streamed = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    last: Any = [chunk async for chunk in streamed][-1]
    made: Any = await client.responses.create(model="", input="a", max_output_tokens=4)
    found = [
        (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
        for details in (
            answer.usage.completion_tokens_details,
            last.usage.completion_tokens_details,
            made.usage.output_tokens_details,
        )
    ]
    assert found == [(12, 8), (6, 4), (6, 4)]


async def test_a_choice_that_a_stop_string_ends_tells_its_drafts(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler
) -> None:
    """The router cuts it, and waits for the replica's word of it."""
    fields: Any = {"model": "", "messages": [USER], "max_tokens": 30, "seed": 1, "n": 3}
    texts = [choice.message.content for choice in (await client.chat.completions.create(**fields)).choices]
    scheduler.drafts = (10, 6)
    answer: Any = await client.chat.completions.create(**fields, stop=[text[5:9] for text in texts])
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 18


def test_a_beam_search_takes_it_without_effect() -> None:
    search = pb.BeamSearch(width=2)
    beams.check(pb.GenerateRequest(beam_search=search, sampling=pb.SamplingParams(num_speculative_tokens=3)))
