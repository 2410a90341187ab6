"""Memory of items: lower limits leave more KV blocks, no limits load no tower, and an error says what to lower."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.options import Options
from tests.support.models.vision_models import Make, idefics3, qwen2_5_vl, qwen2_vl, smolvlm, write_model
from worker.cpu.build import build_cpu_runner
from worker.cpu.runner import Runner
from worker.encoders.sizes import item_sizes
from worker.errors import PermanentError
from worker.models.loader import LoadedModel, load_model

NO_ITEMS = {"image": 0, "video": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    write_model(qwen2_vl, directory)
    return directory


def options_of(model: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "kv_cache_memory": 0.02,
        "max_model_len": 64,
        "block_size": 8,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "worker_threads": 1,
        "weight_cache": 0,
    }
    return Options(**(values | changes))


def num_blocks(model: Path, limits: dict[str, Any], **changes: Any) -> int:
    runner = build_cpu_runner(options_of(model, limit_mm_per_prompt=limits, **changes))
    has_items = limits != NO_ITEMS
    assert (runner.items is not None) == bool(runner.model_info.media_json) == has_items
    return runner.model_info.num_blocks


def test_lower_limits_leave_more_blocks(model: Path) -> None:
    def image(count: int, side: int) -> dict[str, Any]:
        return {"image": {"count": count, "width": side, "height": side}, "video": 0}

    # Sizes beyond what images are resized to gain nothing.
    counts = [
        num_blocks(model, limits) for limits in (image(4, 900), image(4, 48), image(1, 48), image(1, 16), NO_ITEMS)
    ]
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)
    fewer = num_blocks(model, image(4, 48), mm_processor_kwargs={"max_pixels": 512})
    assert fewer > counts[1]
    larger_cache = num_blocks(model, image(4, 48), encoder_cache_size=1000)
    assert larger_cache < counts[1]


def test_limits_of_zero_load_no_tower(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LoadedModel] = []

    def kept(*args: Any, **named: Any) -> LoadedModel:
        made.append(load_model(*args, **named))
        return made[-1]

    monkeypatch.setattr("worker.cpu.build.load_model", kept)
    num_blocks(model, {"image": 1, "video": 0})
    num_blocks(model, NO_ITEMS)
    assert [each.encoder is not None for each in made] == [True, False]


def test_no_room_says_what_would_work(model: Path) -> None:
    with pytest.raises(PermanentError) as caught:
        build_cpu_runner(options_of(model, encoder_cache_size=100_000))
    message = str(caught.value)
    assert message.startswith(
        "kv_cache_memory=0.02 GiB has no room for KV blocks beside images and videos, which take 0.0"
    )
    assert "for encoder_cache_size=100000; use a lower limit_mm_per_prompt, such as" in message
    enough = float(message.rpartition("kv_cache_memory=")[2])
    build_cpu_runner(options_of(model, encoder_cache_size=100_000, kv_cache_memory=enough))


@pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, smolvlm, idefics3])
@pytest.mark.parametrize("limits", [{}, {"image": 2}])
def test_starts_with_defaults(
    make: Make, limits: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory of items is beside the default of kv_cache_memory, and the largest item fits into the longest
    prompt."""
    write_model(make, tmp_path)
    caplog.set_level("INFO", "octavo.worker")

    def built(limits: dict[str, Any]) -> Runner:
        options = {"dtype": "float32", "worker_threads": 1, "weight_cache": 0, "limit_mm_per_prompt": limits}
        return build_cpu_runner(Options(model=str(tmp_path), **options))  # type: ignore[arg-type]

    runner = built(limits)
    assert runner.items is not None
    assert runner.model_info.num_blocks == built(NO_ITEMS).model_info.num_blocks
    assert "beside kv_cache_memory=1; the largest of up to 1024 tokens is" in caplog.text
    assert "to decode one image of max_item_pixels=40000000 takes up to 0.75 GiB more" in caplog.text


def test_a_machine_without_the_memory_is_warned_of(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(available: int) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
        build_cpu_runner(Options(model=str(model), dtype="float32", worker_threads=1, weight_cache=0))

    build(2**31)
    assert "may take" not in caplog.text
    build(2**30)
    assert "an image that is decoded and the KV blocks may take 1.8 GiB together, and 1.0 GiB are" in caplog.text


def test_prompts_are_as_long_as_the_memory_beside_their_items_allows(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If max_model_len is not given, kv_cache_memory is divided so that the largest item fits into the longest
    prompt."""
    video = {"image": 0, "video": {"count": 1, "num_frames": 16}}

    def sizes_of(gib: float, **changes: Any) -> tuple[int, int, int]:
        options = options_of(model, kv_cache_memory=gib, limit_mm_per_prompt=video, max_num_batched_tokens=8, **changes)
        runner = build_cpu_runner(options)
        assert runner.items is not None
        sizes = item_sizes(options, runner.items.encoder, torch.float32, runner.model_info.max_model_len)
        assert sizes is not None
        assert sizes.num_embeddings <= runner.items.cache_size
        return runner.model_info.max_model_len, runner.model_info.num_blocks, sizes.num_embeddings

    whole = sizes_of(0.2, max_model_len=0)
    assert whole[0] == 1024
    assert whole[2] == 320
    lengths = []
    for gib in (0.0045, 0.002, 0.0015):
        length, num_blocks, num_embeddings = sizes_of(gib, max_model_len=0)
        lengths.append(length)
        assert num_embeddings <= length <= 8 * num_blocks
    assert lengths == sorted(set(lengths), reverse=True)
    assert "raise kv_cache_memory=0.0015, or lower limit_mm_per_prompt, for more" in caplog.text
    # A length that is given leaves no choice.
    with pytest.raises(PermanentError, match=r"max_model_len=1024 does not fit|no room for KV blocks beside"):
        sizes_of(0.0015, max_model_len=1024)


def test_kinds_that_the_model_does_not_take_are_no_items(tmp_path: Path) -> None:
    """SmolVLM takes no videos: with images refused, there is nothing to announce."""
    write_model(smolvlm, tmp_path)
    runner = build_cpu_runner(options_of(tmp_path, limit_mm_per_prompt={"image": 0, "video": 1}))
    assert runner.items is None
    assert not runner.model_info.media_json


def test_sizes_by_default(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = build_cpu_runner(options_of(model))
    assert runner.items is not None
    encoder = runner.items.encoder
    sizes = item_sizes(options_of(model), encoder, torch.float32, 64)
    assert sizes is not None
    # A step encodes as many embeddings as it has tokens, or the largest item, and as many are kept.
    assert sizes.cache_size == max(128, sizes.num_embeddings)
    assert runner.items.cache_size == sizes.cache_size
    given = item_sizes(options_of(model, max_num_encoder_input_tokens=5000), encoder, torch.float32, 64)
    assert given is not None
    assert given.cache_size == 5000
    small = item_sizes(options_of(model, encoder_cache_size=3), encoder, torch.float32, 64)
    assert small is not None
    assert small.cache_size == 3
    small.warn_of_refusals()
    assert "encoder_cache_size=3: items of more embeddings are refused" in caplog.text
