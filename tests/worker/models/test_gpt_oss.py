"""gpt-oss's files: experts in floats and in MXFP4, and what errors name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.families.gpt_oss import GptOssFiles, gpt_oss_fields
from worker.models.loader import config_of, load_model
from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.mxfp4 import MXFP4_BLOCKS
from worker.weights.reader import WeightsError
from worker.weights.safetensors_source import SafetensorsSource

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def _packed(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks [*shape, 16] and scales [*shape] around 2^-3."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 127, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[GptOssForCausalLM, Path, dict[str, torch.Tensor]]:
    """A model with the numbers that MXFP4 weights stand for, by transformers' own dequantization; its directory, with
    the MXFP4 weights; and their tensors."""
    torch.manual_seed(0)
    config = GptOssConfig(**SHAPE)
    model = GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    packed: dict[str, torch.Tensor] = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for seed, (kind, shape) in enumerate((("gate_up_proj", (3, 192, 2)), ("down_proj", (3, 64, 3)))):
            blocks, scales = _packed(*shape, seed=2 * layer + seed)
            name = f"model.layers.{layer}.mlp.experts.{kind}"
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    replaced = {name.removesuffix("_blocks") for name in packed}
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in replaced} | packed
    save_file(tensors, file)
    config.update(MXFP4)
    config.save_pretrained(tmp_path)
    return model, tmp_path, tensors


def test_dequantization_is_that_of_transformers_bit_by_bit(tmp_path: Path) -> None:
    """transformers returns inputs before outputs. All bytes occur, and scales down to 2^-127."""
    blocks, scales = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16), torch.arange(16, dtype=torch.uint8)
    scales = (scales * 16).view(1, 8, 2)
    experts = "model.layers.0.mlp.experts"
    save_file(
        {f"{experts}.down_proj_blocks": blocks, f"{experts}.down_proj_scales": scales}, tmp_path / "model.safetensors"
    )
    name = f"{experts}.0.down_proj.weight"
    stored = StoredQuantization(schemes=((("Linear",), MXFP4_BLOCKS),))
    source = SafetensorsSource(GptOssFiles(tmp_path), stored, {name: (8, 64)})
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].t()
        # Zeros have signs, too.
        assert torch.equal(source.tensor(name, dtype).view(torch.int8), expected.contiguous().view(torch.int8))


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_checkpoint_in_mxfp4_computes_its_numbers(
    checkpoint: tuple[GptOssForCausalLM, Path, dict[str, torch.Tensor]], quantization: Any
) -> None:
    model, path, _ = checkpoint
    assert config_of(resolve_model(str(path)))[1] == "none"
    prompt = torch.randint(131, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    loaded = load_model(resolve_model(str(path)), dtype=torch.float32, quantization=quantization)
    run = ModelRun(loaded)
    got = run.step([(run.row(prompt, 30), 30)])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    # Eight bits for each weight and input lose a few percent, and may change a router's choice.
    assert relative_error(got, expected) < (1e-4 if quantization == "none" else 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, "experts.down_proj_scales is missing; U8 .3, 64, 3. is expected"),
        ({"down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}, r"down_proj_scales is U8 \[3, 64, 2\]"),
        (
            {"gate_up_proj_scales": torch.full((3, 192, 2), 255, dtype=torch.uint8)},
            "gate_up_proj_scales holds 255",
        ),
        ({"gate_up_proj_blocks": torch.zeros(3, 192, 2, 8, dtype=torch.uint8)}, "blocks of 16 bytes are expected"),
        ({"gate_up_proj_bias": None}, "lacks 6 of .*gate_proj.bias"),
        ({"down_proj_zeros": torch.zeros(3)}, "is no tensor of gpt-oss's experts"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    checkpoint: tuple[GptOssForCausalLM, Path, dict[str, torch.Tensor]],
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    _, path, tensors = checkpoint
    changed = {**tensors, **{f"model.layers.1.mlp.experts.{name}": tensor for name, tensor in change.items()}}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load_model(resolve_model(str(path)), dtype=torch.float32)


def test_another_limit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"swiglu_limit=5.0 is not supported; 7.0 is"):
        gpt_oss_fields({"swiglu_limit": 5.0}, num_layers=1)
