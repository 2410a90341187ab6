"""Reading DeepSeek's config.json and checkpoints, and the size of its KV cache. test_families.py checks its logits."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from configs.options import Options
from kernels.gemm.quantize.reference import quantize_blocks
from kernels.linear.weights import Fp8Weight, dequantize_fp8
from runtime.model_files import resolve_model
from tests.support.models.families import make_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError
from worker.layers.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.config import config_from_directory
from worker.models.loader import load_model
from worker.models.registry import model_class
from worker.weights.reader import WeightsError

# The configs of deepseek-ai/DeepSeek-V3 and DeepSeek-V2-Lite, as far as they differ from other models'.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V2_LITE: dict[str, Any] = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
# Some sizes fill whole FP8 blocks, others do not.
SMALL: dict[str, Any] = V3 | {
    "vocab_size": 131,
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 144,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PROMPT = torch.randint(131, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def _read(path: Path, config: dict[str, Any]) -> ModelConfig:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return config_from_directory(path)


def _random_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(config.architecture).tensor_shapes(config)
    return {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + ("norm" in name)
        for name, shape in shapes.items()
    }


def _write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    _read(path, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def _logits(path: Path) -> torch.Tensor:
    run = ModelRun(load_model(resolve_model(str(path)), dtype=torch.float32))
    return run.step([(run.row(PROMPT, 60), 60)])


def test_config_of_v3(tmp_path: Path) -> None:
    """The scale of scores is the paper's, for heads of 192, times the square of YaRN's factor."""
    config = _read(tmp_path, V3)
    latent, experts = config.latent, config.experts
    assert latent is not None
    assert experts is not None
    assert (latent.query_rank, latent.entry_size, latent.head_size) == (1536, 576, 192)
    assert latent.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (config.rope.attention_factor, config.rope_size) == (1.0, 64)
    assert experts.layers == (False,) * 3 + (True,) * 58
    assert (experts.scoring, experts.has_bias, experts.renormalize) == ("sigmoid", True, True)
    assert (experts.num_groups, experts.top_k_groups, experts.scaling_factor) == (8, 4, 2.5)
    assert experts.shared_intermediate_size == 2048
    assert config.left_out == ("model.layers.61.",)
    # 70 KB a token in bfloat16, whatever the number of heads; keys and values of 128 heads would take 5 MB.
    assert KVCache.block_bytes(config, 16, torch.bfloat16) == 61 * 16 * 576 * 2


def test_config_of_v2_lite(tmp_path: Path) -> None:
    config = _read(tmp_path, V2_LITE)
    latent, experts = config.latent, config.experts
    assert latent is not None
    assert experts is not None
    assert latent.query_rank is None
    assert (experts.scoring, experts.has_bias, experts.renormalize) == ("softmax", False, False)
    assert (experts.num_groups, experts.top_k_groups, experts.scaling_factor) == (1, 1, 1.0)
    assert experts.shared_intermediate_size == 2816
    # mscale and mscale_all_dim are both 0.707: the rope divides one's factor by the other's, and the attention scale
    # contains the square of one.
    assert config.rope.attention_factor == 1.0
    assert latent.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"topk_method": "greedy"}, "topk_method='greedy' are not supported.*noaux_tc are"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"v_head_dim": 20}, "v_head_dim=20 is not supported: it must be a multiple of 8"),
        ({"n_group": 7}, "n_group=7 does not divide 256 experts"),
        ({"topk_group": 9}, "topk_group=9 of n_group=8"),
        ({"kv_lora_rank": None}, "config.json"),
    ],
)
def test_what_is_not_deepseek_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _read(tmp_path, V3 | change)


def test_an_e4m3_cache_is_refused_on_a_cpu(tmp_path: Path) -> None:
    make_model("deepseek-v3", tmp_path)
    options = Options(model=str(tmp_path), dtype="bfloat16", kv_cache_dtype="fp8", worker_threads=1, max_model_len=64)
    with pytest.raises(PermanentError, match="kv_cache_dtype=fp8: on a CPU DeepseekV3ForCausalLM has latent attention"):
        build_cpu_runner(options)


def test_rope_of_halves_and_greedy_tokens(tmp_path: Path) -> None:
    """Rope may also turn (i, i + R / 2), for which CPUs reorder weights; queries may come from the hidden state."""
    sizes = {name: value for name, value in SMALL.items() if name not in ("architectures", "scoring_func")}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | {"q_lora_rank": None, "rope_interleave": False})).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.float32))
    [said] = run.greedy([PROMPT[:20]], 8, chunk=7)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([PROMPT[:20] + said])).logits[0]
    assert said == expected_TV[19:-1].argmax(dim=1).tolist()
    tokens = run.row(PROMPT[:20] + said, 28)
    assert relative_error(run.step([(tokens, 28)]), expected_TV) < 1e-4


def test_a_sequence_has_its_bits_alone_and_in_any_company(tmp_path: Path) -> None:
    config = _read(tmp_path, SMALL)
    path = _write(tmp_path, SMALL, _random_tensors(config))
    run = ModelRun(load_model(resolve_model(str(path)), dtype=torch.bfloat16), dtype=torch.bfloat16)
    alone, among = run.row(PROMPT[:20], 20), run.row(PROMPT[:20], 20)
    expected = run.step([(alone, 20)])
    other, last = run.row(PROMPT[20:50], 30), run.row(PROMPT[50:], 10)
    got = [
        run.step([(other, 7), (among, 9)])[7:],
        run.step([(among, 10), (last, 10), (other, 20)])[:10],
        run.step([(other, 3), (among, 1)])[3:],
    ]
    assert torch.equal(torch.cat(got), expected)


def test_layers_that_look_further_ahead_are_left_out(tmp_path: Path) -> None:
    tensors = _random_tensors(_read(tmp_path, SMALL))
    expected = _logits(_write(tmp_path / "without", SMALL, tensors))
    extra = {"model.layers.2.eh_proj.weight": torch.ones(3, 4), "model.layers.2.enorm.weight": torch.ones(3)}
    assert torch.equal(_logits(_write(tmp_path / "with", SMALL, tensors | extra)), expected)
    unknown = {"model.layers.3.enorm.weight": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"1 tensors are not of this architecture: model\.layers\.3\.enorm"):
        _logits(_write(tmp_path / "unknown", SMALL, tensors | unknown))


def test_a_checkpoint_in_blocks_of_fp8(tmp_path: Path) -> None:
    """As DeepSeek ships V3: all linear layers are FP8 except routers and the head, which its config does not mention.
    On a CPU the logits equal those of the dequantized floats."""
    floats = _random_tensors(_read(tmp_path, SMALL))
    stored: dict[str, torch.Tensor] = {}
    for name in [name for name in floats if "_proj" in name and name.endswith("weight")]:
        values, scales = quantize_blocks(floats[name])
        stored |= {name: values, f"{name}_scale_inv": scales}
        floats[name] = dequantize_fp8(Fp8Weight(values_OI=values, scales=scales))
    path = _write(tmp_path / "fp8", SMALL | {"quantization_config": FP8}, floats | stored)
    assert load_file(path / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"].itemsize == 1
    assert torch.equal(_logits(path), _logits(_write(tmp_path / "floats", SMALL, floats)))
