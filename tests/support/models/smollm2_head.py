"""An EAGLE-3 head over SmolLM2 with random weights: its drafts are wrong, as a rule."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, DRAFTABLE = 576, 768, 9, 3, 64, 49152, 4096


def write_smollm2_head(directory: Path, *, kept_layers: Sequence[int] = ()) -> Path:
    """kept_layers: the layers whose inputs it reads. (): those that EAGLE-3 reads by default."""
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
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTABLE,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    }
    if kept_layers:
        config["eagle_aux_hidden_state_layer_ids"] = list(kept_layers)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"d2t": 11 * torch.arange(DRAFTABLE)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory
