"""Large inputs that the limits allow do not stop the router's event loop, on which all other streams live.

The bound is generous, for busy machines: what is tested for took 2 s and more in one go.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.fakes.media import chat_with, image_file, image_item, media_scheduler, media_tokenizer
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

_MOST_S = 1.0


@contextlib.asynccontextmanager
async def _watched() -> AsyncIterator[None]:
    """Fails if a ticker of this loop, on which the router runs, stands still for long while inside."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    yield
    await asyncio.sleep(0.01)
    ticking.cancel()
    assert max(gaps) < _MOST_S


async def test_tokenizing_megabytes(tmp_path: Path) -> None:
    """`encode` holds the interpreter's lock: 4 MB stopped everything for 2.0 s."""
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model_info(max_model_len=200_000))
    text = "The quick brown fox jumps over the lazy dog. " * 88_888
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        async with _watched():
            answer = await stub.Tokenize(pb.TokenizeRequest(prompt=text))
    assert len(answer.token_ids) > 800_000


async def test_hostile_constraints(tmp_path: Path) -> None:
    """They are read in another process: Python's regular expressions keep the interpreter's lock, and took 20 s."""
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    router = running_router([fake.address], constraint_compile_timeout=0.5)
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        # The first one pays for the engine.
        await _refused(stub, pb.Constraint(regex="("))
        async with _watched():
            await _refused(stub, pb.Constraint(grammar='start: "a"' + "<" * 65_000))
            await _refused(stub, pb.Constraint(json_schema='"' + '\\"' * 32_000))


async def _refused(stub: InferenceStub, constraint: pb.Constraint) -> None:
    request = pb.GenerateRequest(prompt="Hi", sampling=pb.SamplingParams(max_tokens=1, constraint=constraint))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_detokenizing_as_many_tokens_as_one_call_may_have(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    token_ids = smollm2_tokenizer().encode(" one two three four") * (2**20 // 4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        async with _watched():
            with contextlib.suppress(Exception):
                # The answer is longer than this client takes.
                await stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))


async def test_the_worst_resume(tmp_path: Path) -> None:
    """64 choices of 420 times the longest token under 16 long stop strings: 4 to 14 s in one go before."""
    tokenizer = smollm2_tokenizer()
    longest = max(range(20, 49_152), key=lambda token_id: len(tokenizer.token_text(token_id) or ""))
    text = tokenizer.token_text(longest) or ""
    stop = [f"{(text * 900)[:900]}{number:0100}" for number in range(16)]
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(n=64, seed=1, max_tokens=420, stop=stop),
        resume=pb.Resume(attempt=1, prompt_token_ids=[1000] * 16, fingerprint="one"),
    )
    for index in range(64):
        # They lack the last character only: the answer is small.
        delivered = len((text * 420).encode()) - 1
        request.resume.choices.add(index=index, output_token_ids=[longest] * 420, text_bytes_delivered=delivered)
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        async with _watched():
            result = await stub.GenerateUnary(request)
    assert [(choice.text, choice.finish.reason) for choice in result.choices] == [
        (text[-1:], pb.FINISH_REASON_LENGTH)
    ] * 64


async def test_large_images(tmp_path: Path) -> None:
    """Their bytes are hashed, and base64 decoded, on threads, in pieces: base64 of 12 MB took 50 ms in one go."""
    fake = media_scheduler(socket_address(tmp_path, "one"))
    large = image_file(30, 30) + bytes(10 * 2**20)
    url = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    router = running_router([fake.address], tokenizer=media_tokenizer())
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        for item in (image_item(large), pb.Item(image=pb.Image(url=url))):
            request = pb.GenerateRequest(chat=chat_with(item, "?"), sampling=pb.SamplingParams(max_tokens=1))
            async with _watched():
                await stub.GenerateUnary(request)
    (data,) = fake.items.values()
    assert pb.ItemData.FromString(data).files[0] == large
