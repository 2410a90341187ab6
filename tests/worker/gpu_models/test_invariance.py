"""batch_invariant on the GPU path: a sequence's logits have the same bits whatever is computed beside it, and however
its prompt is cut."""

import pytest
import torch

from kernels.backend import gpu_backend
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import DictReader, GpuModelRun
from worker.model_config import ModelConfig, RopeConfig
from worker.models.families.llama import LlamaModel

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    layer_windows=(9,),
    qkv_bias=True,
    rope=RopeConfig(theta=1e4),
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def _model(kv_cache_dtype: torch.dtype | None) -> LlamaModel:
    path = gpu_backend(torch.bfloat16, torch.device(DEVICE), kv_cache_dtype=kv_cache_dtype, batch_invariant=True)
    generator = torch.Generator().manual_seed(0)
    shapes = LlamaModel.tensor_shapes(CONFIG)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}
    with torch.inference_mode():
        return LlamaModel(CONFIG, DictReader(tensors, torch.bfloat16), path)


def _tokens(length: int, seed: int) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kv_cache_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_a_sequence_has_its_bits_alone_and_in_any_company(kv_cache_dtype: torch.dtype | None) -> None:
    model = _model(kv_cache_dtype)
    sequence = _tokens(19, seed=1)
    alone = GpuModelRun(model, model.backend, block_size=8, num_blocks=129, max_rows=4)
    expected = [alone.step({0: sequence[:17]}), alone.step({0: sequence[17:18]}), alone.step({0: sequence[18:]})]

    among = GpuModelRun(model, model.backend, block_size=8, num_blocks=129, max_rows=4)
    others = _tokens(40, seed=2)
    got = [
        among.step({1: others[:5], 3: sequence[:6]})[5:],
        among.step({3: sequence[6:17], 2: others[5:22], 1: others[22:23]}, padded_rows=1, padded_tokens=5)[:11],
        # A draft behind a decode: two tokens of a row in one step.
        among.step({2: others[23:24], 1: others[24:25], 3: sequence[17:]}, padded_rows=1, padded_tokens=2)[2:],
    ]
    assert torch.equal(torch.cat(got), torch.cat(expected))
