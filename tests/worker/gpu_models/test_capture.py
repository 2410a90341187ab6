"""Models with every kind of layer can be captured: the host reads nothing from the device, and all memory stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from kernels.backend import gpu_backend
from runtime.model_files import resolve_model
from tests.fakes.gpu.recording_device import RecordingDevice
from tests.support.gpu.gpu_runs import GpuModelRun
from worker.models.loader import load_model

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="a recording is one of the interpreter"),
    # The interpreter's numpy warns about memory that has never been written.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
QWEN3 = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTRAL = {
    **SHAPE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **SHAPE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LLAMA4 = {
    **SHAPE,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size_mlp": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "no_rope_layers": [0],
    "floor_scale": 4,
}


@pytest.mark.parametrize(
    ("config", "quantization", "path"),
    [
        (QWEN3, "none", {"batch_invariant": True}),
        (QWEN3, "fp8", {"kv_cache_dtype": torch.float8_e4m3fn}),
        (MIXTRAL, "fp8", {}),
        (DEEPSEEK, "fp8", {"kv_cache_dtype": torch.float8_e4m3fn}),
        (LLAMA4, "none", {}),
    ],
    ids=["invariant", "fp8", "fp8-experts", "fp8-latents", "scaled-inputs"],
)
def test_a_graph_of_the_forward_pass_gives_what_it_gives(
    config: dict[str, Any], quantization: Any, path: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(
        resolve_model(str(tmp_path)),
        dtype=torch.bfloat16,
        load_format="dummy",
        quantization=quantization,
        make_backend=lambda _: gpu_backend(torch.bfloat16, torch.device("cpu"), **path),
    ).model
    run = GpuModelRun(model, model.backend, block_size=8, num_blocks=9, max_rows=1, max_context=64)
    batch = run.batch({0: [3, 1, 4]})
    logits_TV = torch.empty(3, config["vocab_size"], dtype=torch.bfloat16)

    def forward() -> None:
        with torch.inference_mode():
            run.executor.logits(run.executor.forward(batch, run.kv_cache), logits_TV)

    forward()
    expected = logits_TV.clone()
    graph = RecordingDevice().capture(forward, None)
    batch.token_ids_T.copy_(torch.tensor([2, 2, 2]))
    graph.replay()
    assert not torch.equal(logits_TV, expected), "the graph contains the tokens that it was captured with"
    batch.token_ids_T.copy_(torch.tensor([3, 1, 4]))
    graph.replay()
    assert torch.equal(logits_TV, expected)
