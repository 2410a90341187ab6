"""Tiny models of every family on the GPU path against transformers; without a GPU, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.backend import gpu_backend
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import DictReader, GpuModelRun
from tests.support.models.model_runs import relative_error
from worker.models.config import config_from_directory
from worker.models.registry import family_of, model_class

# The attention kernels support only the head sizes of real models.
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = 11


def _llama() -> PreTrainedModel:
    config = LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    )
    return LlamaForCausalLM(config)


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW))


def _qwen2_with_some_windows() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1))


def _olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**SHAPE))


def _phi3() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**SHAPE, sliding_window=WINDOW, pad_token_id=0))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def _deepseek_v3() -> PreTrainedModel:
    """DeepSeek-V3, which has its own head sizes."""
    others = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    config = DeepseekV3Config(
        **others, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=48, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1,
        n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    caps: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    config = Gemma2Config(**SHAPE, **caps, query_pre_attn_scalar=32, sliding_window=WINDOW)
    # PyTorch's own attention has no soft cap, and transformers 5.17 takes it without a word.
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config)


def _glm4() -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**{**SHAPE, "num_hidden_layers": 1}, pad_token_id=0, eos_token_id=2))


def _gpt_oss() -> PreTrainedModel:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 150000.0}
    return GptOssForCausalLM(
        GptOssConfig(
            **SHAPE, num_local_experts=3, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=rope,
        )
    )  # fmt: skip


def _phi4() -> PreTrainedModel:
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 24, "long_factor": [1.0 + i / 8 for i in range(24)],
    }  # fmt: skip
    shape = {**SHAPE, "hidden_size": 128, "num_hidden_layers": 1}
    return Phi3ForCausalLM(
        Phi3Config(**shape, pad_token_id=0, original_max_position_embeddings=2, rope_parameters=rope)
    )


def _qwen2_moe() -> PreTrainedModel:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"num_hidden_layers": 1}
    experts: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**{**shape, "hidden_size": 128}, **experts, shared_expert_intermediate_size=32)
    )


def _gemma3() -> PreTrainedModel:
    types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=32, sliding_window=WINDOW, layer_types=types)
    )


def _llama4() -> PreTrainedModel:
    """One layer with rope, chunks and an MLP, and one without these, with experts."""
    config = Llama4TextConfig(
        **SHAPE, intermediate_size_mlp=80, num_local_experts=4, num_experts_per_tok=2, moe_layers=[1],
        no_rope_layers=[1, 0], attention_chunk_size=WINDOW, floor_scale=4, attn_scale=0.3, rope_parameters=LLAMA3_ROPE,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def _mixtral() -> PreTrainedModel:
    config = MixtralConfig(**{**SHAPE, "num_hidden_layers": 1}, num_local_experts=5, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


FAMILIES = (
    _deepseek_v3,
    _gemma2,
    _gemma3,
    _glm4,
    _gpt_oss,
    _llama,
    _llama4,
    _mistral,
    _mixtral,
    _olmo2,
    _phi3,
    _phi4,
    _qwen2_moe,
    _qwen2_with_some_windows,
    _qwen3,
)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__.strip("_"))
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return _with_random_weights(request.param())


def _with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        # Fresh biases are 0 and norm weights 1: a model that ignores them would pass.
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def _stored(reference: PreTrainedModel, directory) -> dict[str, torch.Tensor]:
    """The tensors under their checkpoint names, which differ from transformers' for experts."""
    reference.save_pretrained(directory)
    files = family_of(type(reference).__name__).open_files(directory)
    return {name: files.read(name) for name in files.shapes}


def _run(reference: PreTrainedModel, tmp_path, dtype: torch.dtype = torch.float32, **path: Any) -> GpuModelRun:
    tensors = _stored(reference, tmp_path)
    config = config_from_directory(tmp_path)
    gpu = gpu_backend(dtype, torch.device(DEVICE), **path)
    with torch.inference_mode():
        model = model_class(config.architecture)(config, DictReader(tensors, dtype), gpu)
    return GpuModelRun(model, gpu, block_size=8, num_blocks=129, max_rows=4)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _expected(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_logits_of_chunks_and_decodes_in_one_batch_equal_those_of_transformers(
    reference: PreTrainedModel, tmp_path
) -> None:
    """Two prompts, longer than the window and than several blocks, one in chunks beside the other's decodes, followed
    by padding: padding rows and tokens must not affect other logits."""
    run = _run(reference, tmp_path)
    first, second = _prompt(29), _prompt(13, seed=1)
    got = {
        0: [run.step({0: first[:27]})],
        2: [],
    }
    for tokens in ({2: second[:12], 0: first[27:28]}, {0: first[28:29], 2: second[12:13]}):
        logits = run.step(tokens, padded_rows=1, padded_tokens=3)
        for row, part in zip(tokens, logits.split([len(each) for each in tokens.values()]), strict=True):
            got[row].append(part)
    for row, prompt in ((0, first), (2, second)):
        assert relative_error(torch.cat(got[row]), _expected(reference, prompt)) < 1e-4


def test_bfloat16_is_about_as_near_as_transformers_in_bfloat16(tmp_path) -> None:
    """It compares the largest errors of 20 x 131 logits, which scatter."""
    exact = _with_random_weights(_qwen3())
    prompt = _prompt(20)
    expected = _expected(exact, prompt)
    got = _run(exact, tmp_path, torch.bfloat16).step({1: prompt}).float()
    rounded = _expected(exact.bfloat16(), prompt)
    assert relative_error(got, expected) < 1.5 * relative_error(rounded, expected)
