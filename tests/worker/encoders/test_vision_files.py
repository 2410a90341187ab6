"""Checkpoints of vision models under the names that published files have, and towers that ranks share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels.backend import torch_backend
from kernels.shard import Shard
from runtime.model_files import resolve_model
from tests.support.models.ranks import run_ranks
from tests.support.models.vision_models import QWEN, TILED, item, picture, qwen2_5_vl, qwen2_vl, write_model
from worker.encoders.encoder import Encoder
from worker.models.loader import WantedItems, load_model
from worker.parallel.gloo import GlooGroup

_IMAGE = item([picture(61, 45)])


def _load(directory: Path, shard: Shard | None = None, quantization: Any = "auto") -> Encoder:
    """In PyTorch: C++ kernels of several threads of a process would wait for each other."""
    backend = torch_backend(torch.float32)
    wanted = WantedItems(limits=ItemLimits(), processor=ProcessorOptions())
    encoder = load_model(
        resolve_model(str(directory)),
        dtype=torch.float32,
        items=wanted,
        quantization=quantization,
        make_backend=lambda config: backend if shard is None else replace(backend, shard=shard),
    ).encoder
    assert encoder is not None
    return encoder


def _embeddings(encoder: Encoder) -> torch.Tensor:
    with torch.inference_mode():
        return encoder.encode(encoder.prepare(_IMAGE))


def _renamed(directory: Path, prefixes: dict[str, str]) -> int:
    """Gives tensors other prefixes; returns how many."""
    file = directory / "model.safetensors"
    tensors, count = {}, 0
    for name, tensor in load_file(file).items():
        new = next((to + name.removeprefix(old) for old, to in prefixes.items() if name.startswith(old)), name)
        count += new != name
        tensors[new] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    return count


@pytest.mark.parametrize("make", QWEN, ids=lambda make: make.__name__)
def test_published_names_of_qwen(make: Any, tmp_path: Path) -> None:
    write_model(make, tmp_path)
    expected = _embeddings(_load(tmp_path))
    newer = {"visual.": "model.visual.", "model.layers.": "model.language_model.layers."}
    older = {each: name for name, each in newer.items()}
    assert _renamed(tmp_path, newer) or _renamed(tmp_path, older)
    assert torch.equal(_embeddings(_load(tmp_path)), expected)


@pytest.mark.parametrize("make", [qwen2_5_vl, TILED[0]], ids=lambda make: make.__name__)
def test_ranks_share_a_tower(make: Any, tmp_path: Path) -> None:
    """Each has half of the heads and of the MLPs; sums of two parts round otherwise than one."""
    write_model(make, tmp_path)
    whole = _load(tmp_path)
    expected = _embeddings(whole)

    def of_rank(group: GlooGroup) -> tuple[torch.Tensor, int]:
        encoder = _load(tmp_path, Shard(group.rank, group.size))
        encoder.group = group
        return _embeddings(encoder), encoder.weight_bytes

    (first, num_bytes), (second, _) = run_ranks(tmp_path, 2, of_rank)
    assert torch.equal(first, second)
    assert (first - expected).abs().max() < 1e-4 * expected.abs().max()
    assert num_bytes < whole.weight_bytes


def test_ranks_that_do_not_divide_heads_have_whole_towers(tmp_path: Path) -> None:
    """Three heads."""
    write_model(qwen2_vl, tmp_path)
    whole = _load(tmp_path)
    rank = _load(tmp_path, Shard(1, 2))
    assert rank.weight_bytes == whole.weight_bytes
    assert torch.equal(_embeddings(rank), _embeddings(whole))


def test_towers_stay_floats(tmp_path: Path) -> None:
    write_model(qwen2_5_vl, tmp_path)
    assert torch.equal(_embeddings(_load(tmp_path, quantization="int8")), _embeddings(_load(tmp_path)))
