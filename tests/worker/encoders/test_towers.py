"""Encoders of tiny random models against transformers: pixels bit by bit, embeddings within rounding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels import cpu_backend
from kernels.backend import Backend, gpu_backend, torch_backend
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO
from runtime.media.recipes.recipe import ItemSize
from runtime.model_files import resolve_model
from tests.support.gpu.gpu import DEVICE
from tests.support.models.model_runs import relative_error
from tests.support.models.vision_models import QWEN, TILED, item, picture, write_model
from worker.encoders.encoder import Encoder, Pixels
from worker.models.families.qwen2_vl import QwenEncoder
from worker.models.families.smolvlm import SmolVLMEncoder
from worker.models.loader import WantedItems, load_model

# Odd sizes: less than the least, more than the most pixels, narrow, and of several windows.
SIZES = [(5, 7), (37, 53), (61, 30), (9, 120), (200, 90)]
# Tokens of the longest prompt.
_NO_LIMIT = 1 << 30


@dataclass
class Pair:
    reference: Any
    directory: Path
    encoder: Encoder


def _load(directory: Path, backend: Backend, **options: int) -> Encoder:
    wanted = WantedItems(limits=ItemLimits(), processor=ProcessorOptions(**options))
    files = resolve_model(str(directory))
    loaded = load_model(files, dtype=torch.float32, make_backend=lambda config: backend, items=wanted)
    assert loaded.encoder is not None
    return loaded.encoder


def _pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("model")
    reference: PreTrainedModel = write_model(request.param, directory)
    return Pair(reference, directory, _load(directory, cpu_backend.cpu_backend(torch.float32, 16)))


@pytest.fixture(scope="module", params=QWEN, ids=lambda make: make.__name__)
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request, tmp_path_factory)


@pytest.fixture(scope="module", params=TILED, ids=lambda make: make.__name__)
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request, tmp_path_factory)


@pytest.fixture(scope="module", params=(*QWEN, *TILED), ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _pair(request, tmp_path_factory)


def _qwen_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=256, max_pixels=2560)


def _tiling_processor() -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 32})


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_images_of_qwen(qwen: Pair, width: int, height: int) -> None:
    image = picture(width, height)
    theirs = _qwen_processor()([image], return_tensors="pt")
    encoder, prepared = qwen.encoder, qwen.encoder.prepare(item([image]))
    assert isinstance(encoder, QwenEncoder)
    assert isinstance(prepared, Pixels)
    assert torch.equal(torch.cat([*encoder.patches(prepared)]), theirs["pixel_values"])
    with torch.inference_mode():
        expected = qwen.reference.get_image_features(**theirs).pooler_output[0]
        got = encoder.encode(prepared)
    assert got.dtype is torch.float32
    assert prepared.num_embeddings == len(got)
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize("num_frames", [1, 4, 5])
def test_videos_of_qwen(qwen: Pair, num_frames: int) -> None:
    """Frames by hand: the processor's patches of each, two frames deep."""
    frames = [picture(45, 38, seed) for seed in range(num_frames)]
    encoder = qwen.encoder
    assert isinstance(encoder, QwenEncoder)
    singles = [_qwen_processor()([frame], return_tensors="pt") for frame in (*frames, *frames[-1:] * (num_frames % 2))]
    # The processor repeats each image in both frames of a patch.
    values = [each["pixel_values"].view(-1, 3, 2, 16)[:, :, 0] for each in singles]
    pairs = [torch.stack(values[i : i + 2], dim=2).flatten(1) for i in range(0, len(values), 2)]
    prepared = encoder.prepare(item(frames, is_video=True, frames_per_second=2.0))
    assert isinstance(prepared, Pixels)
    assert torch.equal(torch.cat([*encoder.patches(prepared)]), torch.cat(pairs))
    grid = torch.tensor([[len(pairs), *singles[0]["image_grid_thw"][0, 1:].tolist()]])
    with torch.inference_mode():
        expected = qwen.reference.get_video_features(torch.cat(pairs), grid).pooler_output[0]
        got = encoder.encode(prepared)
    assert relative_error(got, expected) < 1e-4


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tiles(tiled: Pair, width: int, height: int) -> None:
    image = picture(width, height)
    theirs = _tiling_processor()([image], return_tensors="pt")
    encoder, prepared = tiled.encoder, tiled.encoder.prepare(item([image]))
    assert isinstance(encoder, SmolVLMEncoder)
    assert isinstance(prepared, Pixels)
    assert torch.equal(encoder.pixel_values(prepared), theirs["pixel_values"][0])
    with torch.inference_mode():
        expected = tiled.reference.model.get_image_features(**theirs).pooler_output[0]
        got = encoder.encode(prepared)
    assert prepared.num_embeddings == len(got)
    assert relative_error(got, expected.flatten(0, -2)) < 1e-4


def test_without_native_kernels(pair: Pair) -> None:
    data = item([picture(61, 45)])
    other = _load(pair.directory, torch_backend(torch.float32))
    with torch.inference_mode():
        expected = pair.encoder.encode(pair.encoder.prepare(data))
        got = other.encode(other.prepare(data))
    assert relative_error(got, expected) < 1e-4


def test_on_gpus(pair: Pair) -> None:
    data = item([picture(24, 8)])
    other = _load(pair.directory, gpu_backend(torch.float32, torch.device(DEVICE)))
    with torch.inference_mode():
        expected = pair.encoder.encode(pair.encoder.prepare(data))
        got = other.encode(other.prepare(data)).cpu()
    assert relative_error(got, expected) < 1e-4


def test_the_largest_item_is_what_is_reserved(pair: Pair) -> None:
    """No size within the limits has more embeddings, and the dummy has as many."""
    encoder = pair.encoder
    limits = ItemLimits.model_validate({"image": {"count": 1, "width": 90, "height": 60}, "video": 0})
    size = encoder.largest(limits, _NO_LIMIT)
    assert size is not None
    most = encoder.recipe.layout(size).num_embeddings
    assert encoder.dummy(size).num_embeddings == most
    draws = np.random.default_rng(0)
    for _ in range(2000):
        width, height = int(draws.integers(1, 91)), int(draws.integers(1, 61))
        layout = encoder.recipe.layout(ItemSize(kind=ITEM_KIND_IMAGE, width=width, height=height))
        assert layout.num_embeddings <= most, (width, height)


def test_limits_of_zero_leave_no_item(pair: Pair) -> None:
    assert pair.encoder.largest(ItemLimits.model_validate({"image": 0, "video": 0}), _NO_LIMIT) is None


@pytest.mark.parametrize("side", [0, 70])
def test_the_largest_item_fits_into_the_longest_prompt(pair: Pair, side: int) -> None:
    """No size that fits has more embeddings; if none fits, none has fewer tokens."""
    encoder, draws = pair.encoder, np.random.default_rng(1)
    is_qwen = encoder.recipe.placeholder(ITEM_KIND_VIDEO) is not None
    limits = ItemLimits.model_validate({"image": {"count": 1, "width": side}, "video": {"count": 1, "num_frames": 9}})
    sizes: list[ItemSize] = []
    for _ in range(3000):
        width, height = int(draws.integers(1, (side or 200) + 1)), int(draws.integers(1, 200))
        num_frames = int(draws.integers(1, 10)) if is_qwen and draws.random() < 0.5 else 1
        kind = ITEM_KIND_IMAGE if num_frames == 1 else ITEM_KIND_VIDEO
        sizes.append(ItemSize(kind=kind, width=width, height=height, num_frames=num_frames))
    layouts = [encoder.recipe.layout(size) for size in sizes]
    for most_tokens in (1, 5, 17, 23, 50, 97, 210, 1000):
        largest = encoder.largest(limits, most_tokens)
        assert largest is not None
        layout = encoder.recipe.layout(largest)
        fitting = [each.num_embeddings for each in layouts if len(each.token_ids) <= most_tokens]
        if fitting:
            assert len(layout.token_ids) <= most_tokens
            assert layout.num_embeddings >= max(fitting)
        else:
            assert len(layout.token_ids) <= min(len(each.token_ids) for each in layouts)


def test_videos_are_reserved_for(qwen: Pair) -> None:
    videos = ItemLimits.model_validate({"image": 0, "video": {"count": 1, "num_frames": 6}})
    size = qwen.encoder.largest(videos, _NO_LIMIT)
    assert size is not None
    assert size.num_frames == 6


def test_options_bound_pixels(qwen: Pair) -> None:
    encoder = _load(qwen.directory, torch_backend(torch.float32), min_pixels=1, max_pixels=640)
    assert encoder.prepare(item([picture(90, 90)])).num_embeddings == 9
    size = encoder.largest(ItemLimits(), _NO_LIMIT)
    assert size is not None
    assert encoder.dummy(size).num_embeddings == 80
    data = item([picture(90, 90)])
    data.options.max_pixels = 256
    assert encoder.prepare(data).num_embeddings == 4
