"""Recipes count and write the tokens that transformers' processors do."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO
from runtime.media.recipes.idefics3 import Idefics3Recipe
from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from runtime.media.recipes.recipe import ItemSize, Recipe
from runtime.media.recipes.registry import recipe_from_json, recipe_to_json

_QWEN = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_config": {"tokens_per_second": 2},
}


def _qwen(directory: Path, **preprocessor: object) -> Qwen2VLRecipe:
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return Qwen2VLRecipe.of_files(_QWEN, directory)


def _encode(text: str) -> list[int]:
    """A tokenizer of characters, and of the texts in angle brackets that real ones have as tokens."""
    return [ord(each) for each in text]


def _idefics(directory: Path, *, longest: int = 260, tile: int = 64, splits: bool = True) -> Idefics3Recipe:
    settings = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings | {"do_image_splitting": splits}))
    raw = {"image_token_id": 5, "scale_factor": 2, "vision_config": {"image_size": tile, "patch_size": 16}}
    return Idefics3Recipe.of_files(raw, directory, _encode)


def _image(width: int, height: int, **bounds: int) -> ItemSize:
    return ItemSize(kind=ITEM_KIND_IMAGE, width=width, height=height, **bounds)


def test_images_of_qwen_are_resized_as_by_transformers(tmp_path: Path) -> None:
    recipe, draws = _qwen(tmp_path, min_pixels=3136, max_pixels=100_000), random.Random(1)
    for _ in range(3000):
        width, height = (int(2 ** draws.uniform(0, 12)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ValueError, match="200 times"):
                recipe.layout(_image(width, height))
            continue
        expected = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=100_000)
        assert recipe.resized(_image(width, height)) == expected
        layout = recipe.layout(_image(width, height))
        assert layout.grid == (1, expected[0] // 28, expected[1] // 28)
        assert list(layout.token_ids) == [7] * layout.num_embeddings == [7] * (expected[0] * expected[1] // 784)


def test_a_request_says_its_own_bounds(tmp_path: Path) -> None:
    recipe = _qwen(tmp_path)
    assert recipe.layout(_image(1000, 1000, min_pixels=1, max_pixels=784)).num_embeddings == 1
    assert recipe.layout(_image(28, 28, min_pixels=28 * 28 * 9)).num_embeddings == 9
    with pytest.raises(ValueError, match="min_pixels=2000000 and max_pixels=1003520"):
        recipe.layout(_image(28, 28, min_pixels=2_000_000))


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({}, 3136, 1_003_520),
        ({"min_pixels": 784, "max_pixels": 7840}, 784, 7840),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}}, 784, 7840),
        ({"size": {"min_pixels": 784, "max_pixels": 7840}, "max_pixels": 1568}, 784, 1568),
    ],
)
def test_bounds_are_read_in_each_spelling(tmp_path: Path, settings: dict[str, object], least: int, most: int) -> None:
    bounds = _qwen(tmp_path, **settings).image
    assert (bounds.least, bounds.most) == (least, most)


def test_newer_files_have_both_processors_in_one(tmp_path: Path) -> None:
    both = {"image_processor": {"max_pixels": 7840}, "video_processor": {"max_pixels": 80_000, "min_pixels": 784}}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    recipe = Qwen2VLRecipe.of_files(_QWEN, tmp_path)
    assert (recipe.image.most, recipe.video.most) == (7840, 80_000)


def test_videos_have_times(tmp_path: Path) -> None:
    recipe = _qwen(tmp_path, min_pixels=784, max_pixels=784 * 6)
    size = ItemSize(kind=ITEM_KIND_VIDEO, width=84, height=56, num_frames=5, frames_per_second=4)
    layout = recipe.layout(size)
    assert layout.grid == (3, 2, 3)
    assert list(layout.token_ids) == [8] * 18
    # 2 positions a second, 2 of 4 frames a second in each time.
    assert layout.time_step == 1.0


def test_other_sizes_of_patches_in_the_preprocessor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"patch_size=16 of preprocessor_config.json differs from patch_size=14"):
        _qwen(tmp_path, patch_size=16)


def test_switched_off_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do_resize=False"):
        _qwen(tmp_path, do_resize=False)


def test_tiles_are_those_of_transformers(tmp_path: Path) -> None:
    recipe, draws = _idefics(tmp_path), random.Random(2)
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 260}, max_image_size={"longest_edge": 64}, return_row_col_info=True
    )
    for _ in range(60):
        width, height = (int(2 ** draws.uniform(0, 9)) for _ in range(2))
        theirs = processor([np.zeros((height, width, 3), np.uint8)], input_data_format="channels_last")
        tiling = recipe.tiling(_image(width, height))
        assert (tiling.rows, tiling.columns) == (theirs["rows"][0][0], theirs["cols"][0][0]), (width, height)
        assert tiling.num_tiles == len(theirs["pixel_values"][0])
        text = get_image_prompt_string(
            tiling.rows, tiling.columns, 4, "<fake_token_around_image>", "\x05", "<global-img>"
        )
        layout = recipe.layout(_image(width, height))
        assert list(layout.token_ids) == _encode(text)
        assert layout.num_embeddings == list(layout.token_ids).count(5) == 4 * tiling.num_tiles


def test_a_model_without_splitting_has_one_tile(tmp_path: Path) -> None:
    layout = _idefics(tmp_path, splits=False).layout(_image(500, 300))
    assert layout.num_embeddings == 4


def test_idefics3_has_no_videos_and_no_bounds(tmp_path: Path) -> None:
    recipe = _idefics(tmp_path)
    assert recipe.placeholder(ITEM_KIND_VIDEO) is None
    with pytest.raises(ValueError, match="no videos"):
        recipe.layout(ItemSize(kind=ITEM_KIND_VIDEO, width=8, height=8))
    with pytest.raises(ValueError, match="max_pixels=100 has no meaning"):
        recipe.layout(_image(8, 8, max_pixels=100))


@pytest.mark.parametrize("make", [_qwen, _idefics])
def test_recipes_travel_as_text(tmp_path: Path, make: object) -> None:
    assert callable(make)
    recipe = make(tmp_path)
    assert isinstance(recipe, Recipe)
    copy = recipe_from_json(recipe_to_json(recipe))
    assert copy == recipe
    assert copy.layout(_image(123, 45)) == recipe.layout(_image(123, 45))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"name": "qwen9"}', "'qwen9' is not known; idefics3, qwen2_vl are"),
        ('{"name": "qwen2_vl", "patch_size": 14}', "damaged"),
    ],
)
def test_damaged_recipes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_from_json(text)


def test_the_default_bounds_are_those_of_transformers(tmp_path: Path) -> None:
    size = Qwen2VLImageProcessorPil.size
    bounds = _qwen(tmp_path).image
    assert (bounds.least, bounds.most) == (size["shortest_edge"], size["longest_edge"])
