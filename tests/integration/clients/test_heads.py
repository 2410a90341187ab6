"""An EAGLE-3 head over SmolLM2, which shares its embeddings: its random drafts change no output, greedy or sampled."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo import SamplingParams
from octavo.local.llm import LLM
from tests.integration.clients.test_speculation import CHATS
from tests.support.scheduler.costs import make_drafts_free

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, DRAFTABLE = 576, 768, 9, 3, 64, 49152, 4096
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.7, top_p=0.9, n=2, seed=5, max_tokens=12, repetition_penalty=1.05),
]


def write_head(directory: Path) -> Path:
    q, kv, both = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, 2 * HIDDEN
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFTABLE, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (q, both),
        "midlayer.self_attn.k_proj.weight": (kv, both),
        "midlayer.self_attn.v_proj.weight": (kv, both),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, q),
        "midlayer.mlp.gate_proj.weight": (FFN, HIDDEN),
        "midlayer.mlp.up_proj.weight": (FFN, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, FFN),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTABLE, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"d2t": 11 * torch.arange(DRAFTABLE)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def outputs_of(llm: LLM) -> list[tuple[int, ...]]:
    return [
        tuple(choice.token_ids)
        for sampling in SAMPLINGS
        for each in llm.generate(CHATS[1:], sampling)
        for choice in each.choices
    ]


def test_outputs_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)
    config = {"method": "eagle3", "model": str(write_head(tmp_path)), "num_speculative_tokens": 3}
    llm = LLM(worker_threads=2, speculative_config=config)
    assert outputs_of(llm) == outputs_of(LLM(worker_threads=2))
    assert llm._engine._core.stats.num_draft_tokens > 0
