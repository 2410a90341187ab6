"""Measures the memory that images take by limit_mm_per_prompt, and encodes one image for many requests.

    python -m benchmarks.cluster.images [--part memory|requests] [--kv-cache-memory N] [--json]

The shapes are those of Qwen2.5-VL-3B, in bfloat16, with random weights. memory: KV blocks that a CPU worker gets of
kv_cache_memory for each limit, as a worker plans it at its start: what the largest item takes to be encoded, inputs
that wait, and the cache of embeddings. requests: `octavo up` with 4 of the 36 layers and 4 of the 32 layers of the
vision tower, and --requests requests at once, each with a text of its own before the image; once all with one image of
640 x 480 pixels, once each with another. Says how many images were encoded, and the seconds of this beside all seconds
of the steps. Writing the tokenizer needs transformers. Takes 2 minutes and 8 GiB of memory.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.up import serving
from configs.groups.media import ItemLimits
from configs.options import Options
from kernels.shard import ALL_LAYERS, WHOLE
from octavo import AsyncClient, SamplingParams
from runtime.model_files import resolve_model
from tests.support.models.vision_models import IMAGE, VIDEO, file_of, picture, write_tokenizer
from tests.support.ports import free_port, free_ports
from worker.cpu.cache_sizes import cache_sizes
from worker.encoders.sizes import ItemMemory
from worker.models.config import config_from_directory
from worker.models.info import resolve_num_blocks, wanted_items
from worker.models.loader import load_model

_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "out_hidden_size": 2048,
    "tokens_per_second": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "silu",
    "in_chans": 3,
}
_PREPROCESSOR = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 12845056,
}
_DTYPE = torch.bfloat16
_SMALL = {"count": 1, "width": 640, "height": 480}
_LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"image": 2},
    {"image": 16, "video": 0},
    {"image": 2, "video": 0},
    {"image": {**_SMALL, "count": 2}, "video": 0},
    {"image": _SMALL, "video": 0},
    {"image": 0, "video": 0},
)
_FEW = 4
_WIDTH, _HEIGHT = 640, 480
_NUM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory by one limit, in GiB. largest: embeddings of the largest item."""

    limit: Mapping[str, Any]
    largest: int
    encoder_weights: float
    # Part of kv_cache_memory if that is given, else beside it.
    items: float
    num_blocks: int
    # Tokens that the blocks hold.
    num_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that began together. encoder_s: part of steps_s."""

    num_images: int
    num_requests: int
    num_encoded: int
    encoder_s: float
    steps_s: float
    num_steps: int


def write_shapes(directory: Path, *, num_layers: int, depth: int) -> None:
    """Writes the files of a Qwen2.5-VL-3B with so many layers, without weights."""
    directory.mkdir()
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_TEXT,
        "num_hidden_layers": num_layers,
        "vision_config": {**_VISION, "depth": depth},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
    write_tokenizer(directory)


def measure_memory(directory: Path, kv_cache_memory: float | None) -> Iterator[Memory]:
    """Yields the memory by each limit. Blocks depend on all layers, what items take on the tower alone: one layer of
    the language model is loaded."""
    whole, loaded_from = directory / "whole", directory / "one_layer"
    write_shapes(whole, num_layers=_TEXT["num_hidden_layers"], depth=_VISION["depth"])
    write_shapes(loaded_from, num_layers=1, depth=_VISION["depth"])
    config = config_from_directory(whole)
    files = resolve_model(str(loaded_from))
    given: dict[str, Any] = {} if kv_cache_memory is None else {"kv_cache_memory": kv_cache_memory}
    options = Options(model=str(whole), dtype="bfloat16", **given)
    encoder = load_model(files, dtype=_DTYPE, load_format="dummy", items=wanted_items(options)).encoder
    assert encoder is not None
    for limit in _LIMITS:
        limited = Options(
            model=str(whole),
            dtype="bfloat16",
            **given,
            limit_mm_per_prompt=ItemLimits.model_validate(limit),
        )
        found = cache_sizes(
            limited,
            config,
            partial(resolve_num_blocks, limited, config, _DTYPE, WHOLE, ALL_LAYERS, None),
            partial(ItemMemory.of, limited, encoder),
        )
        items = found.items
        yield Memory(
            limit=limit,
            largest=items.sizes.num_embeddings if items else 0,
            encoder_weights=encoder.weight_bytes / 2**30 if items else 0.0,
            items=items.num_bytes / 2**30 if items else 0.0,
            num_blocks=found.num_blocks,
            num_tokens=found.num_blocks * limited.block_size,
            max_model_len=found.max_model_len,
        )


def measure_requests(directory: Path, num_requests: int) -> Iterator[Run]:
    """Yields a run of one image, and one of as many as there are requests."""
    model = directory / "few_layers"
    write_shapes(model, num_layers=_FEW, depth=_FEW)
    port, metrics_port = free_port(), free_ports(3)
    small = {"image": _SMALL, "video": 0}
    with serving(
        f"--model={model}",
        "--load-format=dummy",
        "--dtype=bfloat16",
        "--kv-cache-memory=2",
        f"--port={port}",
        f"--metrics-port={metrics_port}",
        f"--limit-mm-per-prompt={json.dumps(small)}",
    ):
        worker_port = Options(metrics_port=metrics_port).process_metrics_port("worker")
        files = [file_of(picture(_WIDTH, _HEIGHT, seed)) for seed in range(num_requests + 1)]
        for images in (files[:1], files[1:]):
            before = _counters(worker_port)
            asyncio.run(_ask(port, [images[i % len(images)] for i in range(num_requests)]))
            after = {name: value - before[name] for name, value in _counters(worker_port).items()}
            yield Run(
                num_images=len(images),
                num_requests=num_requests,
                num_encoded=round(after["octavo_worker_encoded_items_total"]),
                encoder_s=after["octavo_worker_encoder_seconds_total"],
                steps_s=after["octavo_worker_step_seconds_sum"],
                num_steps=round(after["octavo_worker_step_seconds_count"]),
            )


async def _ask(port: int, files: Sequence[bytes]) -> None:
    """Sends a request for each file at once, whose texts differ from their first token on."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    async with AsyncClient(f"localhost:{port}", timeout=600) as client:
        prompts = [f"{number:02} is the number of this image: <image> What is on it?" for number in range(len(files))]
        await asyncio.gather(
            *(client.generate(prompt, sampling, items=[file]) for prompt, file in zip(prompts, files, strict=True))
        )


def _counters(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def _line(found: Memory | Run) -> str:
    match found:
        case Memory():
            return (
                f"{json.dumps(found.limit):66} {found.largest:10} {found.encoder_weights:8.2f} {found.items:6.2f} "
                f"{found.num_blocks:7} {found.num_tokens:7} {found.max_model_len:13}"
            )
        case Run():
            return (
                f"{found.num_requests:8} {found.num_images:6} {found.num_encoded:7} {found.encoder_s:10.2f} "
                f"{found.steps_s:8.2f} {found.encoder_s / found.steps_s:7.1%} {found.num_steps:6}"
            )


_HEADS = {
    "memory": f"{'limit_mm_per_prompt':66} embeddings  encoder  items  blocks  tokens max_model_len",
    "requests": "requests images encoded  encoder s  steps s   share  steps",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*_HEADS], help="default: both")
    parser.add_argument("--kv-cache-memory", type=float, help="GiB; default: the option's own, with items beside it")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="a line for each figure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        parts: dict[str, Iterator[Memory] | Iterator[Run]] = {
            "memory": measure_memory(directory, arguments.kv_cache_memory),
            "requests": measure_requests(directory, arguments.requests),
        }
        for part, found in parts.items():
            if arguments.part not in (None, part):
                continue
            if not arguments.json:
                print(_HEADS[part])
            for each in found:
                print(json.dumps({"part": part, **asdict(each)}) if arguments.json else _line(each), flush=True)


if __name__ == "__main__":
    sys.exit(main())
