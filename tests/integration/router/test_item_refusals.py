"""Images and videos that routers refuse: messages name the field and what would work, and nothing is left behind."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from configs.features import ITEMS
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from runtime.media.recipes.idefics3 import Idefics3Recipe
from runtime.media.recipes.registry import recipe_to_json
from tests.fakes.media import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    chat_with,
    image_file,
    image_item,
    media_scheduler,
    media_tokenizer,
    video_item,
)
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

SAMPLING = pb.SamplingParams(max_tokens=6, seed=5)


async def _refused(
    stub: InferenceStub, request: pb.GenerateRequest, code: grpc.StatusCode, words: str
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await receive(stub.Generate(request))
    assert caught.value.code() is code
    return caught.value


def _ids(*ids: int, items: int = 0, **fields: object) -> pb.GenerateRequest:
    item = image_item(image_file())
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        items=[item] * items,
        sampling=SAMPLING,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_ids(30, IMAGE_TOKEN), "token_ids.ids has 1 placeholders for images .token 6., and the request has 0"),
        (_ids(30, items=1), "has 0 placeholders for images .token 6., and the request has 1"),
        (_ids(30, *[IMAGE_TOKEN] * 3, items=3), r"items\[2\].image is image 3 of 3: limit_mm_per_prompt allows 2"),
        (_ids(IMAGE_TOKEN, items=1, suffix="x"), "items has 1 entries, and suffix is set, too"),
        (
            pb.GenerateRequest(chat=chat_with("?"), items=[image_item(b"x")]),
            "items has 1 entries, and a chat has its items in parts",
        ),
        (_ids(IMAGE_TOKEN, items=1, item_options=pb.ItemOptions(max_pixels=0)), "item_options.max_pixels=0"),
        (
            _ids(IMAGE_TOKEN, items=1, item_options=pb.ItemOptions(min_pixels=9, max_pixels=8)),
            "item_options.min_pixels=9 is above max_pixels=8",
        ),
        (
            _ids(IMAGE_TOKEN, items=1, item_options=pb.ItemOptions(min_pixels=2**20, max_pixels=2**21)),
            "item_options give items.0..image .* embeddings: mm_processor_kwargs and limit_mm_per_prompt allow 64",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VIDEO_TOKEN]), items=[video_item()]),
            r"items\[0\].video.frames is empty",
        ),
        (
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[VIDEO_TOKEN]), items=[video_item(image_file(20, 20), image_file(20, 21))]
            ),
            r"items\[0\].video.frames\[1\] has 20 x 21 pixels, and the first frame 20 x 20",
        ),
        (
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[VIDEO_TOKEN]),
                items=[video_item(image_file(), frames_per_second=float("nan"))],
            ),
            r"items\[0\].video.frames_per_second=nan",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), items=[pb.Item()]),
            r"items\[0\] is empty: set image or video",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), items=[pb.Item(image=pb.Image())]),
            r"items\[0\].image has no source",
        ),
        (
            pb.GenerateRequest(chat=chat_with(pb.Item(image=pb.Image(url="https://example.com/a.png")))),
            "this router fetches nothing .allowed_media_domains is empty.",
        ),
        (
            pb.GenerateRequest(chat=chat_with(pb.Item(image=pb.Image(url="file:///etc/passwd")))),
            "use a data: URI, https:// or http://",
        ),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])),
            r"chat.messages\[0\].parts\[0\] is empty",
        ),
    ],
)
async def test_refusals_name_the_field(request_: pb.GenerateRequest, words: str, tmp_path: Path) -> None:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    limits = {"image": 2, "video": 1}
    router = running_router([fake.address], tokenizer=media_tokenizer(), limit_mm_per_prompt=limits)
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        await _refused(stub, request_, grpc.StatusCode.INVALID_ARGUMENT, words)
        assert server.intake.items.store.num_bytes == 0
    assert not fake.submitted


async def test_a_video_for_a_model_that_takes_images_only(tmp_path: Path) -> None:
    recipe = Idefics3Recipe(
        image_token=IMAGE_TOKEN,
        tile_size=32,
        tile_embeddings=4,
        longest_edge=32,
        splits=False,
        around=(1,),
        whole=(2,),
        row_end=(3,),
        last_row_end=(4,),
        places=(),
    )
    model = model_info(media_json=recipe_to_json(recipe))
    fake = FakeScheduler(socket_address(tmp_path, "one"), model=model, features=[ITEMS])
    router = running_router([fake.address], tokenizer=media_tokenizer())
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        video = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[IMAGE_TOKEN]), items=[video_item(image_file())])
        words = r"items\[0\].video is set, and this model takes none of this kind: leave it out"
        await _refused(stub, video, grpc.StatusCode.INVALID_ARGUMENT, words)
        await receive(stub.Generate(_ids(IMAGE_TOKEN, items=1)))
    assert len(fake.submitted) == 1


async def test_sizes_are_bounded(tmp_path: Path) -> None:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    options: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": {"count": 4, "width": 100}, "video": 0},
        "max_item_mib": 0.5,
        "max_items_mib": 1.0,
        "max_item_pixels": 10_000,
        "item_memory": 1.2 / 1024,
        "mm_processor_kwargs": {"max_pixels": 28 * 28 * 8},
    }
    file = image_file(20, 20)
    padded = file + bytes(400_000)
    router = running_router([fake.address], tokenizer=media_tokenizer(), **options)
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()

        def asked(*files: bytes, **fields: object) -> pb.GenerateRequest:
            chat = chat_with(*map(image_item, files), "?")
            return pb.GenerateRequest(chat=chat, sampling=SAMPLING, **fields)  # type: ignore[arg-type]

        wrong = grpc.StatusCode.INVALID_ARGUMENT
        await _refused(stub, asked(file + bytes(600_000)), wrong, "max_item_mib allows 524288")
        await _refused(stub, asked(*[padded] * 3), wrong, "max_items_mib allows 1048576")
        await _refused(stub, asked(image_file(101, 99)), wrong, "limit_mm_per_prompt allows width=100 for images")
        await _refused(stub, asked(image_file(100, 101)), wrong, "100 x 101 = 10100 pixels: max_item_pixels=10000")
        await _refused(
            stub,
            asked(file, item_options=pb.ItemOptions(max_pixels=28 * 28 * 9)),
            wrong,
            "max_pixels=7056: use at most 6272",
        )
        video = pb.GenerateRequest(chat=chat_with(video_item(file)))
        await _refused(stub, video, wrong, "is video 1 of 1: limit_mm_per_prompt allows 0")
        # Two that together fill the memory: the second one comes when the first has ended.
        fake.pause_at = 1
        first = stub.Generate(asked(padded, image_file(color=5) + bytes(400_000)))
        received = await receive(first, until=lambda received: received.token_ids.get(0))
        other = asked(image_file(color=9) + bytes(400_000), image_file(color=10) + bytes(400_000))
        await _refused(stub, other, grpc.StatusCode.RESOURCE_EXHAUSTED, "item_memory")
        await fake.resume_steps()
        await receive(first, into=received)
        await server.streams.wait_empty()
        await receive(stub.Generate(other))
