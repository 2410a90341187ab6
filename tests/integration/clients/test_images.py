"""Images over HTTP: OpenAI's chats and responses, and Anthropic's messages, by their own clients; a fake scheduler
computes."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.server import RouterServer
from tests.fakes.media import IMAGE_TOKEN, RECIPE, VIDEO_TOKEN, image_file, media_scheduler, media_tokenizer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

FILE = image_file(56, 84)
NUM_TOKENS = 6
URI = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[RouterServer]:
    async with running_router([scheduler.address], tokenizer=media_tokenizer()) as (server, _):
        await server.wait_ready()
        yield server
        assert server.intake.items.store.num_bytes == 0


@pytest.fixture
async def url(router: RouterServer) -> AsyncIterator[str]:
    gateway = Gateway(router.intake, router.metrics.registry, router.readiness, max_body_bytes=8 * 2**20)
    http = GatewayServer(gateway, "127.0.0.1", 0)
    http.start()
    yield f"http://127.0.0.1:{http.port}"
    # Bodies are counted until their requests are accepted, and no longer.
    assert gateway._bodies._shared.total == 0
    await http.stop()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _part(url: str = URI, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _chat(*content: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"model": "", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "seed": 1, **fields}


def _prompt(scheduler: FakeScheduler) -> list[int]:
    """The last request's."""
    return scheduler.prompts[scheduler.submitted[-1].group]


async def test_a_chat_streamed_and_whole(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    asked = _chat("What is ", _part(), "?")
    whole = await client.chat.completions.create(**asked)
    prompt = _prompt(scheduler)
    assert prompt.count(IMAGE_TOKEN) == NUM_TOKENS
    assert pb.ItemData.FromString(scheduler.items[scheduler.submitted[0].items[0].name]).files[0] == FILE
    deltas = [
        piece.choices[0].delta.content or ""
        async for piece in await client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(deltas) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    # A bare URL, as some clients send it; the same image is the same item.
    await client.chat.completions.create(**_chat("What is ", {"type": "image_url", "image_url": URI}, "?"))
    assert _prompt(scheduler) == prompt
    assert len(scheduler.arrived_items) == 1


async def test_a_large_image_is_read_in_another_process(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    large = FILE + bytes(2 * 2**20)
    uri = f"data:;base64,{base64.b64encode(large).decode()}"
    await client.chat.completions.create(**_chat("?", _part(uri)))
    (data,) = scheduler.items.values()
    assert pb.ItemData.FromString(data).files[0] == large


async def test_a_video_comes_as_frames(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    frames = [image_file(56, 56, "JPEG", color=color) for color in (1, 2)]
    uri = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    part = {"type": "video_url", "video_url": {"url": uri}}
    await client.chat.completions.create(
        **_chat(part, "?"), extra_body={"media_io_kwargs": {"video": {"fps": 4, "num_frames": 2}}}
    )
    assert _prompt(scheduler).count(VIDEO_TOKEN) == 4
    (data,) = scheduler.items.values()
    sent = pb.ItemData.FromString(data)
    assert (list(sent.files), sent.frames_per_second) == (frames, 4.0)


async def test_processor_kwargs_change_the_tokens(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    body = {"mm_processor_kwargs": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 2}}
    await client.chat.completions.create(**_chat("?", _part()), extra_body=body)
    (data,) = scheduler.items.values()
    assert pb.ItemData.FromString(data).options.max_pixels == 28 * 28 * 2
    # 56 x 84 pixels shrink to 28 x 28: sides are rounded down to whole tokens.
    assert _prompt(scheduler).count(IMAGE_TOKEN) == 1


async def test_responses(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    content = [{"type": "input_text", "text": "What is "}, {"type": "input_image", "image_url": URI, "detail": "auto"}]
    message: Any = {"role": "user", "content": content}
    answer = await client.responses.create(model="", input=[message], max_output_tokens=4)
    assert _prompt(scheduler).count(IMAGE_TOKEN) == NUM_TOKENS
    # The conversation has a file, so it is not kept.
    assert answer.model_dump()["store"] is False
    with pytest.raises(openai.BadRequestError, match="is not stored here"):
        await client.responses.create(model="", input="And?", previous_response_id=answer.id)
    # A conversation of text goes on with an image.
    first = await client.responses.create(model="", input="Hi", max_output_tokens=2)
    await client.responses.create(model="", input=[message], previous_response_id=first.id, max_output_tokens=2)
    assert _prompt(scheduler).count(IMAGE_TOKEN) == NUM_TOKENS
    assert len(scheduler.submitted[-1].items) == 1
    with pytest.raises(openai.BadRequestError, match="there are no stored images"):
        await client.responses.create(
            model="", input=[{"role": "user", "content": [{"type": "input_image", "file_id": "f", "detail": "auto"}]}]
        )


async def test_anthropics_messages(url: str, scheduler: FakeScheduler) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}
    image: Any = {"type": "image", "source": source}
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a plot:"}, image]}
    call: Any = {"type": "tool_use", "id": "t", "name": "plot", "input": {}}
    messages: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(model="", max_tokens=4, messages=messages)
        counted = await client.messages.count_tokens(model="", messages=messages)
        prompt = _prompt(scheduler)
        assert prompt.count(IMAGE_TOKEN) == 2 * NUM_TOKENS
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(prompt)
        assert counted.input_tokens == len(prompt)
        assert len(scheduler.arrived_items) == 1
        wrong: Any = {"type": "image", "source": {**source, "media_type": "image/jpeg"}}
        with pytest.raises(anthropic.BadRequestError, match="but the data is PNG"):
            await client.messages.create(model="", max_tokens=1, messages=[{"role": "user", "content": [wrong]}])
        document: Any = {"type": "document", "source": source}
        with pytest.raises(anthropic.BadRequestError, match="type='document': this API takes text and image"):
            await client.messages.create(model="", max_tokens=1, messages=[{"role": "user", "content": [document]}])


async def test_tokenize_and_ignored_details(url: str, scheduler: FakeScheduler) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        asked = _chat("What is ", _part(detail="high"), "?")
        answer = await http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200
        assert answer.headers["x-octavo-ignored-fields"] == "detail"
        counted = await http.post("/tokenize", json={"messages": asked["messages"]})
        assert counted.json()["tokens"] == _prompt(scheduler)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (_part("data:image/png,abc"), "messages.0.content.0.image_url.url: the data: URI begins with"),
        (_part("data:image/png;base64,@@@"), "messages.0.content.0.image_url.url: its base64 can't be decoded"),
        (_part("data:image/png;base64,"), "messages.0.content.0: there is no data"),
        (_part("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4="), "messages.0.content.0: the data is SVG or XML: use PNG"),
        (_part("http://127.0.0.1:8000/a.png"), "allowed_media_domains is empty"),
        (_part("/etc/passwd"), "use a data: URI, https:// or http://"),
        ({"type": "image_url"}, "a part of type image_url needs image_url"),
        ({"type": "input_audio", "input_audio": {}}, "type='input_audio': this API takes text and images only"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "a video comes as its frames"),
    ],
)
async def test_errors_name_the_part(client: openai.AsyncOpenAI, part: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**_chat(part, "?"))
    assert words in caught.value.message
    assert caught.value.param == "messages"


async def test_more_than_limit_mm_per_prompt(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image 17 of 17: limit_mm_per_prompt allows 16 a request"):
        await client.chat.completions.create(**_chat(*[_part()] * 17))


def test_the_recipe_of_these_tests() -> None:
    """56 x 84 pixels are 2 x 3 tokens."""
    assert (RECIPE.side, NUM_TOKENS) == (28, 6)
