"""Tiny models of every family against transformers, through files that transformers writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
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
    GraniteConfig,
    GraniteForCausalLM,
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
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from kernels import cpu_backend
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error, typical_error
from tests.support.models.state_families import mamba2, qwen3_next
from worker.models.loader import LoadedModel, load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
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
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = 11


LATENT: dict[str, Any] = {
    **SHAPE, "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip


def _deepseek_v2() -> PreTrainedModel:
    config = DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="group_limited_greedy", routed_scaling_factor=8.0
    )
    return DeepseekV2ForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    """The score scale is not just the head size's, and cosines are multiplied by a factor other than 1."""
    rope: dict[str, Any] = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7}
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(**LATENT, q_lora_rank=24, n_shared_experts=1, routed_scaling_factor=2.5, rope_parameters=rope)
    )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)
    return model


def _llama3() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE))


def _llama4() -> PreTrainedModel:
    """A layer without rope, with experts, between two with chunks; queries grow with every fourth token."""
    config = Llama4TextConfig(
        **SHAPE, head_dim=16, intermediate_size_mlp=72, num_local_experts=5, num_experts_per_tok=2, moe_layers=[1],
        no_rope_layers=[1, 0, 1], attention_chunk_size=WINDOW, floor_scale=4, attn_scale=0.3,
        rope_parameters=LLAMA3_ROPE,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


def _llama_with_everything_optional() -> PreTrainedModel:
    rope: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    return LlamaForCausalLM(
        LlamaConfig(
            **SHAPE, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=rope
        )
    )


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=WINDOW))


def _olmo2() -> PreTrainedModel:
    """With biases, which the config allows."""
    return Olmo2ForCausalLM(Olmo2Config(**SHAPE, attention_bias=True))


def _olmo3() -> PreTrainedModel:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    ropes: dict[str, Any] = {
        "full_attention": YARN_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return Olmo3ForCausalLM(Olmo3Config(**SHAPE, sliding_window=WINDOW, layer_types=types, rope_parameters=ropes))


def _phi4() -> PreTrainedModel:
    """As in Phi-4-mini, rope rotates a part of each head; every prompt is longer than the trained context."""
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 7.0],
    }  # fmt: skip
    return Phi3ForCausalLM(
        Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=2, rope_parameters=rope)
    )


def _phi3() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**SHAPE, sliding_window=WINDOW, pad_token_id=0))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=YARN_ROPE))


def _qwen2_with_some_windows() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))


def _gemma2() -> PreTrainedModel:
    """Caps that scores and logits reach, and a score scale that is not the head size's."""
    caps: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **caps, head_dim=16, query_pre_attn_scalar=8, sliding_window=WINDOW))


def _gemma3() -> PreTrainedModel:
    """As in larger models, the global rope is scaled and the score scale is not the head size's."""
    ropes: dict[str, Any] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE, head_dim=16, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=types,
            rope_parameters=ropes,
        )
    )  # fmt: skip


def _glm4() -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**SHAPE, head_dim=16, pad_token_id=0, eos_token_id=2))


def _gpt_oss() -> PreTrainedModel:
    rope: dict[str, Any] = {**YARN_ROPE, "rope_theta": 150000.0, "truncate": False}
    return GptOssForCausalLM(
        GptOssConfig(
            **SHAPE, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW,
            rope_parameters=rope,
        )
    )  # fmt: skip


def _granite() -> PreTrainedModel:
    multipliers: dict[str, Any] = {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.31,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    }
    # An epsilon large enough to tell apart norms of the stream and of the stream divided by the multiplier.
    return GraniteForCausalLM(GraniteConfig(**SHAPE, **multipliers, rms_norm_eps=0.03, attention_bias=True))


def _mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2))


def _qwen2_moe_with_some_mlps() -> PreTrainedModel:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **experts, shared_expert_intermediate_size=56, mlp_only_layers=[1])
    )


def _smollm3() -> PreTrainedModel:
    return SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1], pad_token_id=0))


def _qwen3_moe_with_some_mlps() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{**SHAPE, "head_dim": 16},
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    )


FAMILIES = (
    _deepseek_v2,
    _deepseek_v3,
    _gemma2,
    _gemma3,
    _glm4,
    _gpt_oss,
    _granite,
    _llama3,
    _llama4,
    _llama_with_everything_optional,
    mamba2,
    _mistral,
    _mixtral,
    _olmo2,
    _olmo3,
    _phi3,
    _phi4,
    _qwen2,
    _qwen2_moe_with_some_mlps,
    _qwen2_with_some_windows,
    _qwen3,
    _qwen3_moe_with_some_mlps,
    qwen3_next,
    _smollm3,
)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__.strip("_"))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, LoadedModel]:
    torch.manual_seed(0)
    reference = request.param().eval()
    for name, parameter in reference.named_parameters():
        # Fresh biases are 0 and norm weights 1: a model that ignores them would pass.
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    path: Path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    return reference, load_model(resolve_model(str(path)), dtype=torch.float32)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_logits(pair: tuple[PreTrainedModel, LoadedModel]) -> None:
    """The prompt is longer than the window and than several blocks. Two float32 implementations differ only by
    rounding."""
    reference, loaded = pair
    prompt = _prompt(70)
    run = ModelRun(loaded)
    logits_TV = run.step([(run.row(prompt, 70), 70)])
    assert logits_TV.dtype is torch.float32
    assert relative_error(logits_TV, _reference_logits(reference, prompt)) < 1e-4


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_prefixes_and_decodes_in_one_batch(pair: tuple[PreTrainedModel, LoadedModel], block_size: int) -> None:
    """A chunk over a cached prefix, decodes and fresh prompts share steps; each row's logits equal those of its whole
    prompt."""
    reference, loaded = pair
    run = ModelRun(loaded, block_size=block_size)
    prompts = [_prompt(length, seed) for seed, length in enumerate((61, 3, 33, 17))]
    rows = [run.row(prompt, len(prompt)) for prompt in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    steps = [[(0, 20), (1, 1)], [(1, 1), (0, 13), (2, 32)], [(2, 1), (1, 1), (3, 17), (0, 7)], [(0, 1)], [(0, 20)]]
    for step in steps:
        logits_TV = run.step([(rows[index], count) for index, count in step])
        for (index, _), part in zip(step, logits_TV.split([count for _, count in step]), strict=True):
            got[index].append(part)
    for prompt, parts in zip(prompts, got, strict=True):
        assert relative_error(torch.cat(parts), _reference_logits(reference, prompt)) < 1e-4


def test_a_shared_prefix_is_read_from_anothers_blocks(pair: tuple[PreTrainedModel, LoadedModel]) -> None:
    reference, loaded = pair
    run = ModelRun(loaded)
    first, second = _prompt(40), _prompt(32) + _prompt(9, seed=5)
    writer = run.row(first, 40)
    run.step([(writer, 40)])
    reader = run.row(second, 41)
    reader.blocks[:2] = writer.blocks[:2]
    reader.num_computed = 32
    logits_TV = run.step([(reader, 9)])
    assert relative_error(logits_TV, _reference_logits(reference, second)[32:]) < 1e-4


def test_without_native_kernels(
    pair: tuple[PreTrainedModel, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler PyTorch computes the same layers, with another KV layout."""
    reference, _ = pair
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    reference.save_pretrained(tmp_path)
    loaded = load_model(resolve_model(str(tmp_path)), dtype=torch.float32)
    assert loaded.model.backend.name == "cpu-onednn-float32"
    run, prompt = ModelRun(loaded), _prompt(70)
    row = run.row(prompt, 70)
    logits_TV = torch.cat([run.step([(row, count)]) for count in (40, 1, 29)])
    assert relative_error(logits_TV, _reference_logits(reference, prompt)) < 1e-4


def test_bfloat16_errs_no_more_than_transformers(pair: tuple[PreTrainedModel, LoadedModel], tmp_path: Path) -> None:
    reference, _ = pair
    prompt = _prompt(70)
    exact = _reference_logits(reference, prompt)
    reference.save_pretrained(tmp_path)
    theirs = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.bfloat16), dtype=torch.bfloat16)
    row = run.row(prompt, 70)
    ours = torch.cat([run.step([(row, 60)]), *(run.step([(row, 1)]) for _ in range(10))])
    # If a router scores two experts nearly equally, rounding decides, so the error of a typical token is compared.
    error = typical_error if hasattr(reference.config, "num_experts_per_tok") else relative_error
    assert error(ours, exact) <= 1.5 * error(_reference_logits(theirs, prompt), exact)


def test_chunks_change_no_bit_and_greedy_tokens_are_those_of_logits(
    pair: tuple[PreTrainedModel, LoadedModel],
) -> None:
    """With C++ kernels, whose results do not depend on what else is in a step."""
    _, loaded = pair
    prompt = _prompt(60)
    whole, chunked, greedy = (ModelRun(loaded) for _ in range(3))
    expected_TV = whole.step([(whole.row(prompt, 60), 60)])
    row, other = chunked.row(prompt, 60), chunked.row(_prompt(9, seed=3), 9)
    steps = [[(row, 21)], [(other, 8), (row, 1)], [(row, 37), (other, 1)], [(row, 1)]]
    got_TV = [
        part
        for step in steps
        for (each, _), part in zip(step, chunked.step(step).split([count for _, count in step]), strict=True)
        if each is row
    ]
    assert torch.equal(torch.cat(got_TV), expected_TV)
    token_ids_S, largest_S = greedy.greedy_step([(greedy.row(prompt, 60), 60)])
    assert torch.equal(token_ids_S, expected_TV.argmax(-1))
    assert torch.equal(largest_S, expected_TV.max(-1).values)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.12), ("int4", 0.7)])
def test_integer_weights_change_logits_little(
    pair: tuple[PreTrainedModel, LoadedModel], quantization: Any, most: float, tmp_path: Path
) -> None:
    """Errors of a typical token: random weights are harder to round than trained ones. A wrong order of
    weights errs by more than 1."""
    reference, _ = pair
    reference.save_pretrained(tmp_path)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.float32, quantization=quantization))
    prompt = _prompt(30)
    error = typical_error(run.step([(run.row(prompt, 30), 30)]), _reference_logits(reference, prompt))
    assert error < most, error
