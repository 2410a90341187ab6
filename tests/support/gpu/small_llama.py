"""A model of random weights on the GPU path, as small as its kernels allow."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.backend import Backend, gpu_backend
from tests.support.gpu.gpu_runs import DictReader
from worker.models.config import config_from_directory
from worker.models.families.llama import LlamaModel

VOCABULARY = 67


def small_llama(num_layers: int, backend: Backend | None = None, **changes: Any) -> LlamaModel:
    """A model for the interpreter, with the same weights each time. changes: of its ModelConfig."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        # Attention kernels support only the head sizes of real models.
        "head_dim": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        model_config = replace(config_from_directory(Path(directory)), **changes)
    generator = torch.Generator().manual_seed(0)
    shapes = LlamaModel.tensor_shapes(model_config)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    backend = backend or gpu_backend(torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        return LlamaModel(model_config, DictReader(weights, torch.float32), backend)
