"""Tiny models with vision towers against transformers, whole: logits of prompts with images and videos, and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs.groups.media import ItemLimits, ProcessorOptions
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO
from runtime.media.positions import mrope_positions
from runtime.media.recipes.recipe import ItemSize
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, Row, relative_error
from tests.support.models.vision_models import IMAGE, QWEN, TILED, VIDEO, item, picture, write_model
from worker.models.loader import LoadedModel, WantedItems, load_model
from worker.step.items import EmbeddedTokens


@dataclass
class Pair:
    reference: Any
    loaded: LoadedModel
    directory: Path

    @property
    def is_qwen(self) -> bool:
        return self.loaded.config.mrope_section is not None


@dataclass
class _Span:
    first_token: int
    num_tokens: int
    grid: Sequence[int]
    time_step: float


@dataclass
class Prompt:
    token_ids: list[int]
    spans: list[_Span]
    # The embeddings of all items, in order, and the tokens that they replace.
    embeddings: torch.Tensor
    places: list[int]
    # For the model of transformers.
    inputs: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=(*QWEN, *TILED), ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("model")
    reference: PreTrainedModel = write_model(request.param, directory)
    wanted = WantedItems(limits=ItemLimits(), processor=ProcessorOptions())
    return Pair(reference, load_model(resolve_model(str(directory)), dtype=torch.float32, items=wanted), directory)


def _text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _prompt(pair: Pair, parts: Sequence[int | Image.Image | list[Image.Image]], rate: float = 1.0) -> Prompt:
    """parts: so many tokens of text, an image, or a video's frames."""
    encoder = pair.loaded.encoder
    assert encoder is not None
    token_ids: list[int] = []
    spans, embeddings = [], []
    for seed, part in enumerate(parts):
        if isinstance(part, int):
            token_ids += _text(part, seed)
            continue
        frames = part if isinstance(part, list) else [part]
        is_video = isinstance(part, list)
        size = ItemSize(
            kind=ITEM_KIND_VIDEO if is_video else ITEM_KIND_IMAGE,
            width=frames[0].width,
            height=frames[0].height,
            num_frames=len(frames),
            frames_per_second=rate if is_video else 0.0,
        )
        layout = encoder.recipe.layout(size)
        spans.append(_Span(len(token_ids), len(layout.token_ids), layout.grid, layout.time_step))
        token_ids += layout.token_ids
        prepared = encoder.prepare(item(frames, is_video=is_video, frames_per_second=rate if is_video else 0.0))
        assert prepared.num_embeddings == layout.num_embeddings
        with torch.inference_mode():
            embeddings.append(encoder.encode(prepared))
    images = [part for part in parts if isinstance(part, Image.Image)]
    videos = [part for part in parts if isinstance(part, list)]
    return Prompt(
        token_ids=token_ids,
        spans=spans,
        embeddings=torch.cat(embeddings),
        places=[place for place, token in enumerate(token_ids) if token in (IMAGE, VIDEO)],
        inputs=_inputs(pair, token_ids, images, videos, rate),
    )


def _inputs(
    pair: Pair, token_ids: list[int], images: list[Image.Image], videos: list[list[Image.Image]], rate: float
) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not pair.is_qwen:
        processor: Any = Idefics3ImageProcessorPil(size={"longest_edge": 72}, max_image_size={"longest_edge": 32})
        return inputs | dict(processor([images], return_tensors="pt"))
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    qwen = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=256, max_pixels=2560)
    if images:
        inputs |= dict(qwen(images, return_tensors="pt"))
    if videos:
        values, grids = [], []
        for frames in videos:
            of_frames = [qwen([frame], return_tensors="pt") for frame in (*frames, *frames[-1:] * (len(frames) % 2))]
            singles = [each["pixel_values"].view(-1, 3, 2, 16)[:, :, 0] for each in of_frames]
            values += [torch.stack(singles[i : i + 2], dim=2).flatten(1) for i in range(0, len(singles), 2)]
            grids.append([len(singles) // 2, *of_frames[0]["image_grid_thw"][0, 1:].tolist()])
        inputs |= {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
        if pair.reference.config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([2 / rate] * len(videos))
    return inputs


class _Run(ModelRun):
    """Steps of one row whose prompt has items."""

    prompt: Prompt

    def _schedule(self, scheduled: Sequence[tuple[Row, int]], *, last_only: bool) -> None:
        (row, count), *others = scheduled
        assert not others
        first = row.num_computed
        super()._schedule(scheduled, last_only=last_only)
        batch, prompt = self._batch, self.prompt
        batch.rope_positions_AT = None
        if self.loaded.config.mrope_section is not None:
            positions_AP, shift = mrope_positions(len(prompt.token_ids), prompt.spans)
            of_step = np.arange(first, first + count)
            later = np.tile(of_step + shift, (3, 1))
            inside = of_step < len(prompt.token_ids)
            later[:, inside] = positions_AP[:, of_step[inside]]
            batch.rope_positions_AT = later.astype(np.int64)
        chosen = [i for i, place in enumerate(prompt.places) if first <= place < first + count]
        batch.embedded, batch.embeddings_ME = None, None
        if chosen:
            places_M = np.array([prompt.places[i] - first for i in chosen], np.int64)
            batch.embedded = EmbeddedTokens(places_M=places_M, parts=())
            batch.embeddings_ME = prompt.embeddings[chosen]


def _run(pair: Pair, prompt: Prompt) -> _Run:
    run = _Run(pair.loaded)
    run.prompt = prompt
    return run


def _expected(pair: Pair, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        return pair.reference(**prompt.inputs).logits[0].float()


def _images(count: int) -> list[Image.Image]:
    sizes = [(45, 70), (33, 21), (120, 30), (8, 9)]
    return [picture(width, height, seed) for seed, (width, height) in enumerate(sizes[:count])]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_logits_of_images(pair: Pair, count: int) -> None:
    """Text before, between and behind. (Models of transformers take images without any token between them for one.)
    Two float32 implementations differ only by rounding."""
    prompt = _prompt(pair, [*(part for image in _images(count) for part in (3, image)), 7])
    run = _run(pair, prompt)
    num_tokens = len(prompt.token_ids)
    got = run.step([(run.row(prompt.token_ids, num_tokens), num_tokens)])
    assert relative_error(got, _expected(pair, prompt)) < 1e-4


def test_chunks_that_cut_an_image_change_no_bit(pair: Pair) -> None:
    prompt = _prompt(pair, [5, *_images(2), 7])
    num_tokens = len(prompt.token_ids)
    whole, chunked = _run(pair, prompt), _run(pair, prompt)
    expected = whole.step([(whole.row(prompt.token_ids, num_tokens), num_tokens)])
    row = chunked.row(prompt.token_ids, num_tokens)
    counts = [3, 6, 1, num_tokens - 12, 2]
    assert torch.equal(torch.cat([chunked.step([(row, count)]) for count in counts]), expected)


@pytest.mark.parametrize("rate", [1.0, 8.0])
def test_logits_of_videos(pair: Pair, rate: float) -> None:
    """With few frames a second, Qwen2.5-VL's positions in time go beyond those in space."""
    if not pair.is_qwen:
        pytest.skip("the model takes images only")
    frames = [picture(45, 38, seed) for seed in range(5)]
    prompt = _prompt(pair, [4, frames, 3, picture(40, 40, 9), 5], rate)
    run = _run(pair, prompt)
    num_tokens = len(prompt.token_ids)
    got = run.step([(run.row(prompt.token_ids, num_tokens), num_tokens)])
    assert relative_error(got, _expected(pair, prompt)) < 1e-4


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    first, second = _images(2)
    parts: list[Any] = [5, first, 1, second, 7]
    if pair.is_qwen:
        # Its positions in time go beyond those of the text after it.
        parts += [[picture(45, 38, seed) for seed in range(6)], 2]
    prompt = _prompt(pair, parts)
    with torch.inference_mode():
        pair.reference.generation_config.eos_token_id = None
        expected = pair.reference.generate(**prompt.inputs, do_sample=False, max_new_tokens=8)
    (got,) = _run(pair, prompt).greedy([prompt.token_ids], 8)
    assert got == expected[0, len(prompt.token_ids) :].tolist()


def test_no_tower_is_loaded_for_text(pair: Pair) -> None:
    limits = ItemLimits.model_validate({"image": 0, "video": 0})
    wanted = WantedItems(limits=limits, processor=ProcessorOptions())
    loaded = load_model(resolve_model(str(pair.directory)), dtype=torch.float32, items=wanted)
    assert loaded.encoder is None
    ids = _text(20, 0)
    run = ModelRun(loaded)
    with torch.inference_mode():
        expected = pair.reference(torch.tensor([ids])).logits[0].float()
    assert relative_error(run.step([(run.row(ids, 20), 20)]), expected) < 1e-4
