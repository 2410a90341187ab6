"""Images and videos on their way through a router: to tokens, to replicas, and back to a client that resumes."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from runtime.media.names import item_name, serialized
from runtime.media.recipes.recipe import ItemSize
from tests.fakes.media import (
    IMAGE_TOKEN,
    RECIPE,
    VIDEO_TOKEN,
    chat_with,
    image_file,
    image_item,
    media_scheduler,
    media_tokenizer,
    video_item,
)
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

SAMPLING = pb.SamplingParams(max_tokens=6, seed=5)


def _num_embeddings(width: int, height: int) -> int:
    size = ItemSize(kind=pb.ITEM_KIND_IMAGE, width=width, height=height)
    return RECIPE.layout(size).num_embeddings


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def router(scheduler: FakeScheduler) -> AsyncIterator[tuple[RouterServer, InferenceStub]]:
    async with running_router([scheduler.address], tokenizer=media_tokenizer()) as (server, stub):
        await server.wait_ready()
        yield server, stub
        # After any request, nothing of its items is left.
        assert server.intake.items.store.num_bytes == 0
        assert len(server.intake.items.store) == 0


async def test_a_chat_with_images_is_tokens_and_items(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    _, stub = router
    files = [image_file(60, 90), image_file(200, 50, "JPEG")]
    chat = chat_with("What is ", image_item(files[0]), " beside ", image_item(files[1]), "?")
    received = await receive(stub.Generate(pb.GenerateRequest(chat=chat, sampling=SAMPLING)))
    assert received.finish[0].reason == pb.FINISH_REASON_LENGTH
    (submit,) = scheduler.submitted
    prompt = scheduler.prompts[submit.group]
    assert received.started.prompt_token_ids == prompt
    assert list(submit.items) == list(received.started.items)
    counts = [_num_embeddings(60, 90), _num_embeddings(200, 50)]
    assert prompt.count(IMAGE_TOKEN) == sum(counts)
    for span, count, file in zip(submit.items, counts, files, strict=True):
        assert (span.num_tokens, span.num_embeddings, span.kind) == (count, count, pb.ITEM_KIND_IMAGE)
        assert prompt[span.first_token : span.first_token + count] == [IMAGE_TOKEN] * count
        assert prompt[span.first_token - 1] != IMAGE_TOKEN
        data = pb.ItemData.FromString(scheduler.items[span.name])
        assert (list(data.files), data.kind) == ([file], pb.ITEM_KIND_IMAGE)
        assert span.name == item_name(serialized(data))
    # The text around them is as without items, but for one token where each item was.
    text = media_tokenizer().encode_chat(chat)
    alone = [token_id for token_id in prompt if token_id != IMAGE_TOKEN]
    assert alone == [token_id for token_id in text if token_id != IMAGE_TOKEN]


async def test_a_video_and_an_image_keep_their_places(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    _, stub = router
    frames = [image_file(56, 56, color=color) for color in (1, 2, 3)]
    video = video_item(*frames, frames_per_second=4.0)
    token_ids = pb.TokenIds(ids=[30, VIDEO_TOKEN, 31, IMAGE_TOKEN, 32])
    request = pb.GenerateRequest(token_ids=token_ids, items=[image_item(image_file(56, 56)), video], sampling=SAMPLING)
    await receive(stub.Generate(request))
    (submit,) = scheduler.submitted
    first, second = submit.items
    # Two frames are a step in time; the third one is the second half-filled step.
    assert (first.kind, list(first.grid), first.time_step) == (pb.ITEM_KIND_VIDEO, [2, 2, 2], 1.0)
    assert (second.kind, list(second.grid)) == (pb.ITEM_KIND_IMAGE, [1, 2, 2])
    expected = [30, *[VIDEO_TOKEN] * 8, 31, *[IMAGE_TOKEN] * 4, 32]
    assert scheduler.prompts[submit.group] == expected
    data = pb.ItemData.FromString(scheduler.items[first.name])
    assert (list(data.files), data.frames_per_second) == (frames, 4.0)


async def test_an_item_travels_once_and_again_when_it_is_wanted(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    """An item larger than a message, too. The replica forgets it: the router sends it while a stream has it."""
    _, stub = router
    # Noise, so that the file is larger than a part of 1 MiB.
    large = image_file(30, 30) + bytes(3 * 2**20)
    request = pb.GenerateRequest(chat=chat_with(image_item(large), "?"), sampling=SAMPLING)
    for _ in range(2):
        await receive(stub.Generate(request))
    assert len(scheduler.arrived_items) == 1
    (name,) = scheduler.items
    assert pb.ItemData.FromString(scheduler.items[name]).files[0] == large
    scheduler.items.clear()
    received = await receive(stub.Generate(request))
    assert received.finished is not None
    assert scheduler.arrived_items == [name, name]


async def test_the_bytes_are_held_once_while_streams_have_them(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    server, stub = router
    scheduler.pause_at = 2
    file = image_file()
    request = pb.GenerateRequest(chat=chat_with(image_item(file), "?"), sampling=SAMPLING)
    calls = [stub.Generate(request) for _ in range(3)]
    begun = [await receive(call, until=lambda received: received.token_ids.get(0)) for call in calls]
    store = server.intake.items.store
    assert len(store) == 1
    assert len(file) < store.num_bytes < len(file) + 100
    assert len(scheduler.arrived_items) == 1
    calls[0].cancel()
    await scheduler.resume_steps()
    for call, received in zip(calls[1:], begun[1:], strict=True):
        await receive(call, into=received)
    await server.streams.wait_empty()


async def test_a_stream_moves_to_another_replica_with_its_items(tmp_path: Path) -> None:
    fakes = [media_scheduler(socket_address(tmp_path, name), pause_at=3) for name in ("one", "two")]
    async with running_schedulers(*fakes):
        addresses = [fake.address for fake in fakes]
        async with running_router(addresses, tokenizer=media_tokenizer()) as (server, stub):
            await server.wait_ready()
            request = pb.GenerateRequest(chat=chat_with(image_item(image_file()), "?"), sampling=SAMPLING)
            call = stub.Generate(request)
            received = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 3)
            lost, other = fakes if fakes[0].submitted else reversed(fakes)
            await lost.kill()
            other.pause_at = None
            await receive(call, into=received)
            assert received.exact
            assert lost.items == other.items
            assert other.submitted[0].items == lost.submitted[0].items
            await server.streams.wait_empty()
            assert server.intake.items.store.num_bytes == 0


async def test_replicas_without_the_feature_get_no_items(tmp_path: Path) -> None:
    older = FakeScheduler(socket_address(tmp_path, "older"), model=model_info())
    newer = media_scheduler(socket_address(tmp_path, "newer"), pause_at=1)
    addresses = [older.address, newer.address]
    async with running_schedulers(older, newer):
        async with running_router(addresses, tokenizer=media_tokenizer()) as (server, stub):
            await server.wait_ready()
            request = pb.GenerateRequest(chat=chat_with(image_item(image_file()), "?"), sampling=SAMPLING)
            calls = [stub.Generate(request) for _ in range(3)]
            begun = [await receive(call, until=lambda received: received.token_ids.get(0)) for call in calls]
            await newer.resume_steps()
            for call, received in zip(calls, begun, strict=True):
                await receive(call, into=received)
            assert (len(older.submitted), len(newer.submitted)) == (0, 3)
        async with running_router([older.address], tokenizer=media_tokenizer()) as (server, stub):
            await server.wait_ready()
            await _refused(stub, request, grpc.StatusCode.INVALID_ARGUMENT, "this model takes text only")


async def test_streams_with_items_wait_for_a_replica_that_takes_them(tmp_path: Path) -> None:
    """An older replica stays, and gets neither the stream nor its image; text goes on there."""
    older = FakeScheduler(socket_address(tmp_path, "older"), model=model_info())
    newer = media_scheduler(socket_address(tmp_path, "newer"), pause_at=2)
    router = running_router([older.address, newer.address], tokenizer=media_tokenizer())
    request = pb.GenerateRequest(chat=chat_with(image_item(image_file()), "?"), sampling=SAMPLING)
    async with running_schedulers(older, newer), router as (server, stub):
        await server.wait_ready()
        call = stub.Generate(request)
        received = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 2)
        await newer.kill()
        text = pb.GenerateRequest(chat=chat_with("only text"), sampling=SAMPLING)
        assert (await receive(stub.Generate(text))).finish[0].reason == pb.FINISH_REASON_LENGTH
        await _refused(stub, request, grpc.StatusCode.UNAVAILABLE, "no replica is ready")
        assert server.num_streams == 1
        newer.pause_at = None
        await newer.start()
        await receive(call, into=received)
        assert received.exact
        assert len(received.token_ids[0]) == SAMPLING.max_tokens
        # Once in each life of the replica.
        assert [span.name for span in received.started.items] * 2 == newer.arrived_items
    assert not older.arrived_items
    assert len(older.submitted) == 1


# --- Resumes


async def _interrupted(stub: InferenceStub, request: pb.GenerateRequest) -> Received:
    call = stub.Generate(request)
    received = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 3)
    call.cancel()
    return received


def _resume_of(received: Received) -> pb.GenerateRequest:
    resume = received.resume_request()
    resume.resume.items.extend(received.started.items)
    return resume


async def test_a_resume_brings_items_only_if_it_is_asked(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    server, stub = router
    item = image_item(image_file())
    request = pb.GenerateRequest(chat=chat_with(item, "?"), sampling=SAMPLING)
    whole = await receive(stub.Generate(request))
    scheduler.pause_at = 3
    received = await _interrupted(stub, request)
    await server.streams.wait_empty()
    scheduler.pause_at = None
    resume = _resume_of(received)
    error = await _refused(stub, resume, grpc.StatusCode.FAILED_PRECONDITION, "send the request's items again")
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    assert b"ITEMS_NEEDED" in details
    resume.items.append(item)
    received.begin_again()
    await receive(stub.Generate(resume), into=received)
    assert received.token_ids == whole.token_ids
    assert received.started.items == whole.started.items


async def test_a_resume_needs_no_items_where_a_stream_holds_them(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    server, stub = router
    request = pb.GenerateRequest(chat=chat_with(image_item(image_file()), "?"), sampling=SAMPLING)
    scheduler.pause_at = 3
    lasting = stub.Generate(request)
    other = await receive(lasting, until=lambda received: len(received.token_ids.get(0, ())) == 3)
    received = await _interrupted(stub, request)
    scheduler.pause_at = None
    resume = _resume_of(received)
    received.begin_again()
    await receive(stub.Generate(resume), into=received)
    await receive(lasting, into=other)
    assert received.token_ids == other.token_ids
    await server.streams.wait_empty()


async def test_a_resume_that_contradicts_its_items_is_refused(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    _, stub = router
    item = image_item(image_file())
    received = await receive(stub.Generate(pb.GenerateRequest(chat=chat_with(item, "?"), sampling=SAMPLING)))
    good = _resume_of(received)
    good.items.append(item)
    del good.resume.choices[:]

    async def refused(words: str, change) -> None:
        wrong = pb.GenerateRequest()
        wrong.CopyFrom(good)
        change(wrong)
        await _refused(stub, wrong, grpc.StatusCode.INVALID_ARGUMENT, words)

    def replace_item(wrong: pb.GenerateRequest) -> None:
        wrong.items[0].CopyFrom(image_item(image_file(color=77)))

    def move_span(wrong: pb.GenerateRequest) -> None:
        wrong.resume.items[0].first_token += 1

    def change_grid(wrong: pb.GenerateRequest) -> None:
        wrong.resume.items[0].grid[1] += 1

    def drop_spans(wrong: pb.GenerateRequest) -> None:
        del wrong.items[:], wrong.resume.items[:]

    await refused(r"items\[0\] is not the item of resume\.items\[0\]", replace_item)
    await refused(r"prompt_token_ids do not have the tokens of resume\.items\[0\]", move_span)
    await refused(r"resume\.items\[0\] is not as this item is here", change_grid)
    await refused("outside of resume.items", drop_spans)
    await refused("items has 2 entries, and resume.items 1", lambda wrong: wrong.items.append(item))
    await receive(stub.Generate(good))


async def _refused(
    stub: InferenceStub, request: pb.GenerateRequest, code: grpc.StatusCode, words: str
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await receive(stub.Generate(request))
    assert caught.value.code() is code
    return caught.value


# --- Other ways to ask


async def test_truncation_keeps_items_whole(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    _, stub = router
    ids, received = [IMAGE_TOKEN, 30, IMAGE_TOKEN, 31, 32], Received()
    # 4 tokens each.
    files = [image_item(image_file(56, 56, color=color)) for color in (1, 2)]
    expected = {
        (pb.TRUNCATION_SIDE_LEFT, 8): ([30, *[IMAGE_TOKEN] * 4, 31, 32], [1]),
        (pb.TRUNCATION_SIDE_LEFT, 4): ([31, 32], []),
        (pb.TRUNCATION_SIDE_RIGHT, 7): ([*[IMAGE_TOKEN] * 4, 30], [0]),
        (pb.TRUNCATION_SIDE_RIGHT, 9): ([*[IMAGE_TOKEN] * 4, 30, *[IMAGE_TOKEN] * 4], [0, 5]),
    }
    for (side, most), (tokens, first_tokens) in expected.items():
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids), items=files, truncate_prompt_tokens=most, truncation_side=side
        )
        request.sampling.CopyFrom(SAMPLING)
        received = await receive(stub.Generate(request))
        assert list(received.started.prompt_token_ids) == tokens
        assert [span.first_token for span in received.started.items] == first_tokens
    assert received.started.items[0].name != received.started.items[1].name


async def test_tokenize_counts_the_tokens_of_items(router: tuple[RouterServer, InferenceStub]) -> None:
    _, stub = router
    chat = chat_with(image_item(image_file(56, 56)), "?")
    answer = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(answer.token_ids).count(IMAGE_TOKEN) == 4


async def test_tokenize_of_items_needs_a_replica(tmp_path: Path) -> None:
    chat = chat_with(image_item(image_file()), "?")
    async with running_router([socket_address(tmp_path, "none")], tokenizer=media_tokenizer()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="no replica is ready") as caught:
            await stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_beam_search_has_the_items_in_each_step(
    scheduler: FakeScheduler, router: tuple[RouterServer, InferenceStub]
) -> None:
    _, stub = router
    scheduler.likely = lambda token_ids: [(40 + i, -1.0 - i) for i in range(8)]
    request = pb.GenerateRequest(
        chat=chat_with(image_item(image_file()), "?"), sampling=SAMPLING, beam_search=pb.BeamSearch(width=2)
    )
    await receive(stub.Generate(request))
    assert len(scheduler.submitted) > 1
    assert all(submit.items == scheduler.submitted[0].items for submit in scheduler.submitted)
    assert len(scheduler.arrived_items) == 1
