"""Tiny models with vision towers say what transformers says about images and a video, and each request gives the same
tokens however its steps are cut, shared or interrupted.

The engine here is scheduling core, plan encoding, encoder, rows, kernels and sampler in one process.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs.options import Options
from kernels import cpu_backend
from octavo.local.engine import Engine
from protos import inference_pb2 as pb
from runtime.media.packed import PackedItem
from runtime.media.recipes.recipe import ItemSize, Recipe
from runtime.media.recipes.registry import recipe_from_json
from tests.support.models.replica import Ranks
from tests.support.models.vision_models import (
    IMAGE,
    VIDEO,
    file_of,
    picture,
    qwen2_5_vl,
    qwen2_vl,
    smolvlm,
    write_model,
)
from worker.process.build import build_runner
from worker.step.runner import StepRunner

NUM_TOKENS = 8
GREEDY = pb.SamplingParams(n=1, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = pb.SamplingParams(n=3, temperature=0.9, top_p=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)
# Widths and heights of images; three frames of a video.
# Text stands between two images, since transformers takes neighbours for one, and ends each prompt: behind an image at
# the end, its `generate` goes on with three different positions, not with those of its own get_rope_index.
FIRST, SECOND, THIRD, FOURTH = (37, 53), (61, 30), (9, 60), (20, 20)
CLIP = (30, 22, 3)


class Asked(NamedTuple):
    """A prompt: token ids, and sizes of images or, with three numbers, of videos."""

    parts: Sequence[int | tuple[int, ...]]
    sampling: pb.SamplingParams = GREEDY


REQUESTS = {
    "one image": Asked([5, 6, 7, FIRST, 8, 9]),
    "two images": Asked([10, FIRST, 11, 12, 13, SECOND, 17]),
    "three images": Asked([THIRD, 16, FOURTH, 14, THIRD, 15]),
    "four images": Asked([20, SECOND, 21, FIRST, 22, THIRD, 23, FOURTH, 24, 25]),
    "text": Asked([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    "a video": Asked([30, CLIP, 31, FOURTH, 32]),
    "three choices": Asked([5, 6, 7, FIRST, 40, SECOND, 41], SAMPLED),
}
LIMITS = {"image": {"count": 4, "width": 80, "height": 80}, "video": {"count": 1, "num_frames": 4}}
OF_TRANSFORMERS = ("one image", "two images", "three images", "four images", "text", "a video")


@dataclass
class Family:
    directory: Path
    reference: Any
    recipe: Recipe
    requests: dict[str, Asked]
    # What the model says in all ways, by request and choice.
    expected: dict[str, list[list[int]]] = field(default_factory=dict)


def _frames(size: tuple[int, ...]) -> list[Any]:
    width, height, *num_frames = size
    return [picture(width, height, seed) for seed in range(num_frames[0] if num_frames else 1)]


def options_of(family: Family, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "model": str(family.directory),
        "dtype": "float32",
        "num_blocks_override": 200,
        "block_size": 8,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_model_len": 300,
        "worker_threads": 1,
        "weight_cache": 0,
        "limit_mm_per_prompt": LIMITS,
    }
    return Options(**(values | changes))


def submit(engine: Engine, group: int, asked: Asked, recipe: Recipe) -> list[int]:
    """Returns the prompt's token ids."""
    tokens: list[int] = []
    spans: list[pb.ItemSpan] = []
    files: list[PackedItem] = []
    for part in asked.parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        kind = pb.ITEM_KIND_VIDEO if len(part) == 3 else pb.ITEM_KIND_IMAGE
        frames = _frames(part)
        size = ItemSize(kind=kind, width=part[0], height=part[1], num_frames=len(frames), frames_per_second=4.0)
        layout = recipe.layout(size)
        fps = 4.0 if kind == pb.ITEM_KIND_VIDEO else 0.0
        files.append(PackedItem(kind, [file_of(frame) for frame in frames], fps, pb.ItemOptions()))
        spans.append(
            pb.ItemSpan(
                name=files[-1].name,
                kind=kind,
                first_token=len(tokens),
                num_tokens=len(layout.token_ids),
                num_embeddings=layout.num_embeddings,
                grid=layout.grid,
                time_step=layout.time_step,
            )
        )
        tokens += layout.token_ids
    engine.submit(group, tokens, asked.sampling, items=spans, files=files)
    return tokens


def generate(
    engine: Engine, requests: dict[str, Asked], recipe: Recipe, *, items_first: bool = False
) -> dict[str, list[list[int]]]:
    """Computes requests together. items_first: begins once all items are prepared; otherwise the time that this takes
    decides which requests run at once. Returns token ids, by request and choice."""
    made = {name: [[] for _ in range(asked.sampling.n)] for name, asked in requests.items()}
    names = dict(enumerate(requests, engine.times.num_steps * 1000 + 1))
    for group, name in names.items():
        submit(engine, group, requests[name], recipe)
    if items_first:
        engine._items.exchange(time.monotonic())
        while engine._items.is_waiting:
            engine._items.wait()
            engine._items.exchange(time.monotonic())
    while engine.has_work:
        for sequence in engine.step().sequences:
            group, choice = sequence.key
            assert sequence.end is None or sequence.end.reason.value == "length", sequence.end
            made[names[group]][choice] += sequence.token_ids
    for group in names:
        engine.cancel(group)
    return made


def said_by_transformers(family: Family, name: str, tokens: list[int]) -> list[int]:
    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    items = [part for part in family.requests[name].parts if not isinstance(part, int)]
    images = [_frames(item)[0] for item in items if len(item) == 2]
    videos = [_frames(item) for item in items if len(item) == 3]
    if family.recipe.name == "qwen2_vl":
        processor = Qwen2VLImageProcessorPil.from_pretrained(family.directory)
        if images:
            inputs |= processor(images, return_tensors="pt")
        if items:
            inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        for frames in videos:
            # Frames by hand, two frames deep: the processor has each image in both frames of a patch.
            singles = [processor([frame], return_tensors="pt") for frame in (*frames, frames[-1])]
            values = [each["pixel_values"].view(-1, 3, 2, 16)[:, :, 0] for each in singles]
            pairs = [torch.stack(values[i : i + 2], dim=2).flatten(1) for i in range(0, len(values), 2)]
            inputs["pixel_values_videos"] = torch.cat(pairs)
            grid = singles[0]["image_grid_thw"][0, 1:].tolist()
            inputs["video_grid_thw"] = torch.tensor([[len(pairs), *grid]])
            if family.reference.config.model_type == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor([2 / 4.0])
    elif images:
        processor = Idefics3ImageProcessorPil.from_pretrained(family.directory)
        inputs |= processor([images], return_tensors="pt")  # type: ignore[arg-type]
    family.reference.generation_config.eos_token_id = None
    said = family.reference.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    return said[0, len(tokens) :].tolist()


def engine_of(family: Family, **changes: Any) -> Engine:
    options = options_of(family, **changes)
    return Engine(build_runner(options), options)


@pytest.fixture(scope="module", params=[qwen2_vl, qwen2_5_vl, smolvlm], ids=lambda make: make.__name__)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The tokens of transformers, and of requests with samples alone."""
    directory = tmp_path_factory.mktemp("model")
    reference = write_model(request.param, directory)
    requests = {name: asked for name, asked in REQUESTS.items() if request.param is not smolvlm or name != "a video"}
    made = Family(directory, reference, None, requests)  # type: ignore[arg-type]
    engine = engine_of(made)
    made.recipe = recipe_from_json(engine.model.media_json)
    for group, (name, asked) in enumerate(requests.items()):
        tokens = submit(engine, group, asked, made.recipe)
        engine.cancel(group)
        if name in OF_TRANSFORMERS:
            made.expected[name] = [said_by_transformers(made, name, tokens)]
        else:
            made.expected |= generate(engine, {name: asked}, made.recipe)
    return made


def check(
    family: Family, engine: Engine, requests: dict[str, Asked] | None = None, *, items_first: bool = False
) -> None:
    requests = requests or family.requests
    made = generate(engine, requests, family.recipe, items_first=items_first)
    assert made == {name: family.expected[name] for name in requests}


def test_alone_as_transformers(family: Family) -> None:
    engine = engine_of(family)
    for name in family.requests:
        check(family, engine_of(family) if name == "four images" else engine, {name: family.requests[name]})
    assert len({str(tokens) for tokens in family.expected.values()}) == len(family.expected), "all say the same"


def test_together_and_again(family: Family) -> None:
    """Images that several requests have are encoded once; the second time all prefixes are found."""
    engine = engine_of(family)
    check(family, engine)
    num_images = len({part for asked in family.requests.values() for part in asked.parts if not isinstance(part, int)})
    assert engine._core.stats.num_encoded_embeddings > 0
    encoded = engine._core.stats.num_encoded_embeddings
    sizes = {part for asked in family.requests.values() for part in asked.parts if not isinstance(part, int)}
    kinds = {2: pb.ITEM_KIND_IMAGE, 3: pb.ITEM_KIND_VIDEO}
    layouts = [
        family.recipe.layout(ItemSize(kind=kinds[len(s)], width=s[0], height=s[1], num_frames=3 if len(s) == 3 else 1))
        for s in sizes
    ]
    assert len(layouts) == num_images
    assert encoded == sum(layout.num_embeddings for layout in layouts)
    check(family, engine)


def test_prefixes_may_end_before_within_and_behind_an_image(family: Family) -> None:
    """Blocks of 8 tokens: a hit ends wherever the last whole block of equal tokens and images does."""
    engine = engine_of(family)
    check(family, engine, {"three choices": family.requests["three choices"]})
    for name in ("one image", "two images", "four images"):
        check(family, engine, {name: family.requests[name]})
    others = {
        "other text": Asked([5, 6, 7, FIRST, 8, 9, 50, 51]),
        "another image": Asked([5, 6, 7, SECOND, 8, 9]),
        "another second image": Asked([10, FIRST, 11, 12, 13, THIRD, 2]),
    }
    fresh = engine_of(family, enable_prefix_caching=False)
    assert generate(engine, others, family.recipe) == generate(fresh, others, family.recipe)


@pytest.mark.parametrize(
    "changes",
    [
        # Every image but the smallest is cut, by 8, 11 and by whole prompts.
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 11, "max_steps_in_flight": 2},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 300},
        # Room for one image: others are dropped, and encoded again.
        {"encoder_cache_size": 90, "max_num_encoder_input_tokens": 1, "max_num_batched_tokens": 40},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_batched_tokens": 50},
    ],
    ids=str,
)
def test_steps_may_be_cut_anywhere(family: Family, changes: dict[str, Any]) -> None:
    check(family, engine_of(family, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_steps_in_flight": 2, "max_num_batched_tokens": 40},
        {"preemption_mode": "swap", "swap_space": 0.05},
    ],
    ids=str,
)
def test_preemptions_change_nothing(family: Family, changes: dict[str, Any]) -> None:
    longest = max(-(-len(submit_tokens(family, name)) // 8) for name in family.requests)
    tight = {"num_blocks_override": longest + 6, "max_model_len": 8 * longest, "enable_prefix_caching": False}
    engine = engine_of(family, **tight, **changes)
    check(family, engine, items_first=True)
    assert engine.num_preemptions > 0


def submit_tokens(family: Family, name: str) -> list[int]:
    """Returns the tokens of a request."""
    tokens: list[int] = []
    for part in family.requests[name].parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            kind = pb.ITEM_KIND_VIDEO if len(part) == 3 else pb.ITEM_KIND_IMAGE
            size = ItemSize(kind=kind, width=part[0], height=part[1], num_frames=3 if len(part) == 3 else 1)
            tokens += family.recipe.layout(size).token_ids
    return [*tokens, *[0] * NUM_TOKENS]


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    options = options_of(family, max_num_batched_tokens=40, **changes)
    runner: StepRunner = Ranks(options, tmp_path)
    try:
        check(family, Engine(runner, options))
    finally:
        runner.join(None)
