"""Phi-3's files and configs: layers stored as one tensor, and unsupported settings, which errors name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from worker.models.families.phi3 import phi3_fields
from worker.weights.fused_files import Phi3Files
from worker.weights.reader import WeightsError

_QKV = "model.layers.0.self_attn.qkv_proj"
_OUT = "model.layers.0.self_attn.o_proj.weight"
_GATE_UP = "model.layers.0.mlp.gate_up_proj"


def _files(directory: Path, **more: torch.Tensor) -> Phi3Files:
    """A checkpoint with 12 outputs of q, 4 each of k and v, and 6 each of gate and up."""
    rows = torch.arange(32.0)[:, None].expand(32, 8)
    tensors = {f"{_QKV}.weight": rows[:20], _OUT: torch.zeros(8, 12), f"{_GATE_UP}.weight": rows[20:]}
    stored = {name: tensor.contiguous() for name, tensor in (tensors | more).items()}
    save_file(stored, directory / "model.safetensors")
    return Phi3Files(directory)


def test_each_layer_has_its_rows(tmp_path: Path) -> None:
    files = _files(tmp_path)
    parts = {"self_attn.q": 12, "self_attn.k": 4, "self_attn.v": 4, "mlp.gate": 6, "mlp.up": 6}
    first = 0
    for part, num_rows in parts.items():
        name = f"model.layers.0.{part}_proj.weight"
        assert files.shapes[name] == (num_rows, 8)
        assert files.read(name)[:, 0].tolist() == list(range(first, first + num_rows))
        assert files.read(name, slice(1, 3))[:, 0].tolist() == [first + 1, first + 2]
        first += num_rows
    assert set(files.shapes) == {f"model.layers.0.{part}_proj.weight" for part in (*parts, "self_attn.o")}
    assert files.stored_name("model.layers.0.self_attn.k_proj.weight") == f"{_QKV}.weight"


def test_scales_are_split_or_shared(tmp_path: Path) -> None:
    by_row, of_all = torch.arange(20.0)[:, None], torch.tensor(3.0)
    files = _files(tmp_path, **{f"{_QKV}.weight_scale": by_row, f"{_GATE_UP}.weight_scale": of_all})
    assert files.read("model.layers.0.self_attn.v_proj.weight_scale").flatten().tolist() == [16, 17, 18, 19]
    assert files.read("model.layers.0.mlp.up_proj.weight_scale") == 3


def test_scales_of_blocks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"qkv_proj.weight_scale_inv has 5 rows"):
        _files(tmp_path, **{f"{_QKV}.weight_scale_inv": torch.ones(5, 2)})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "llama3", "factor": 4.0}, "rope_type='llama3'"),
        ({"type": "su", "long_factor": [1.0]}, "rope_type='longrope': short_factor=None: a list of 2 numbers"),
        ({"type": "yarn", "short_factor": [1.0, "x"], "long_factor": [1.0]}, "short_factor='x' is not a number"),
    ],
)
def test_other_ropes_are_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        phi3_fields({"rope_scaling": rope, "max_position_embeddings": 4096, "head_dim": 4}, num_layers=1)
