"""SmolLM2 in transformers, with weights from the GGUF file through gguf's own reader."""

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.model_files import ModelFiles
from worker.models.gguf_source import hugging_face_names


def transformers_model(files: ModelFiles) -> LlamaForCausalLM:
    """The model in float32, in eval mode."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=8192,
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            )
        )
    state = {}
    for tensor in gguf.GGUFReader(files.path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            heads = len(values) // 64
            values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(heads * 64, 576)
        state[hugging_face_names(tensor.name, "llama")[0]] = torch.from_numpy(values)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
