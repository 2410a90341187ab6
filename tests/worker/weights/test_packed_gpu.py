"""Packed checkpoints on the GPU path: 4-bit integers are multiplied as they are stored, others as floats; without a
GPU, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.backend import gpu_backend
from runtime.model_files import resolve_model
from tests.support.checkpoints.layouts import LAYOUTS, layout_tensors, write_checkpoint
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import GpuModelRun
from tests.support.models.model_runs import relative_error
from worker.models.loader import LoadedModel, load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TOKENS = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("floats")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(path)
    return path


def _load(path: Path, quantization: Any = "auto") -> LoadedModel:
    return load_model(
        resolve_model(str(path)),
        dtype=torch.float32,
        quantization=quantization,
        make_backend=lambda config: gpu_backend(torch.float32, torch.device(DEVICE)),
    )


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = GpuModelRun(loaded.model, loaded.model.backend, block_size=8, num_blocks=9, max_rows=2, max_context=32)
    return torch.cat([run.step({1: TOKENS[:5]}), run.step({1: TOKENS[5:]})]).cpu()


@pytest.mark.parametrize(
    ("name", "auto"), [("awq-32", "int4"), ("gptq-4-64-asymmetric", "int4"), ("w8a16-channel", "none"), ("nf4", "none")]
)
def test_it_computes_what_its_floats_compute(base: Path, tmp_path: Path, name: str, auto: str) -> None:
    """Weights are the same floats, so only the order of sums differs."""
    layout = LAYOUTS[name]
    path = write_checkpoint(tmp_path, base, layout_tensors(base, layout)[0], layout.config)
    kept, floats = _load(path), _load(path, "none")
    assert (kept.quantization, floats.quantization) == (auto, "none")
    assert relative_error(_logits(kept), _logits(floats)) < 1e-4
    assert (kept.model.weight_bytes < 0.6 * floats.model.weight_bytes) is (auto == "int4")


def test_floats_are_made_int4(base: Path) -> None:
    made, floats = _load(base, "int4"), _load(base, "none")
    assert made.quantization == "int4"
    assert 0.01 < relative_error(_logits(made), _logits(floats)) < 1
