"""Models with quantization=fp8 and kv_cache_dtype=fp8_e4m3 on the GPU path, from each kind of checkpoint, against the
same numbers in plain PyTorch; without a GPU, in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from kernels.backend import gpu_backend
from kernels.gemm.quantize.reference import quantize_tokens
from runtime.model_files import resolve_model
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import GpuModelRun
from tests.support.models.fp8_models import (
    FORMATS,
    LAYERS,
    VOCAB,
    Tensors,
    float_tensors,
    plain_logits,
    write_checkpoint,
    write_mixture,
)
from worker.models.loader import LoadedModel, load_model

TOKENS = torch.randint(VOCAB, (6,), generator=torch.Generator().manual_seed(1)).tolist()
# Scales of each layer's keys and values, none of which exceeds 448 scales. A wrong scale would round to other numbers,
# and the error would show.
KV_SCALES = {0: (0.019, 0.021), 1: (0.037, 0.029)}


def _load(path: Path, dtype: torch.dtype, quantization: str, kv_cache_dtype: torch.dtype | None) -> LoadedModel:
    return load_model(
        resolve_model(str(path)),
        dtype=dtype,
        quantization=quantization,  # pyright: ignore[reportArgumentType]
        make_backend=lambda config: gpu_backend(dtype, torch.device(DEVICE), kv_cache_dtype=kv_cache_dtype),
    )


def _logits(
    path: Path,
    dtype: torch.dtype = torch.float32,
    quantization: str = "auto",
    kv_cache_dtype: torch.dtype | None = None,
    cuts: tuple[int, ...] = (5, 1),
) -> torch.Tensor:
    """float64 logits [T, V] of TOKENS. cuts: the number of tokens in each step, by default a prefill and a decode."""
    model = _load(path, dtype, quantization, kv_cache_dtype).model
    run = GpuModelRun(model, model.backend, block_size=8, num_blocks=9, max_rows=2, max_context=32)
    return torch.cat([run.step({1: tokens.tolist()}) for tokens in torch.tensor(TOKENS).split(cuts)]).double()


def _errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each token's error, relative to the size of its logits."""
    return (logits - expected).square().mean(1).sqrt() / expected.square().mean(1).sqrt()


def _assert_computes(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares float32 with float64. An input within 1e-6 of the middle between two e4m3 numbers may round to either,
    an error of some percent in its token and those after it. About one input in 100,000 is such a one, so another
    machine may have one here. On a GPU sums of e4m3 products have 14 bits, and there are more."""
    errors = _errors(logits, expected)
    assert errors.max() < 0.08
    assert DEVICE == "cuda" or errors.median() < 1e-5


@pytest.fixture(scope="module")
def bfloat16_logits(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return _logits(write_checkpoint(tmp_path_factory.mktemp("model"), "online").path, torch.bfloat16, "none")


@pytest.mark.parametrize("how", FORMATS)
def test_logits_are_those_of_the_formulas_and_near_bfloat16(
    tmp_path: Path, how: str, bfloat16_logits: torch.Tensor
) -> None:
    """e4m3 has steps of 1/8 to 1/16 of a number, so rounding has an error of 2.6% (root mean square), and a linear
    layer with rounded inputs and weights one of 3.7%. Some ten layers follow each other here, some through a softmax:
    12% by the formulas, at most 15% for any token."""
    checkpoint = write_checkpoint(tmp_path, how)
    fp8 = checkpoint.fp8 or {
        name: quantize_tokens(weight) for name, weight in checkpoint.floats.items() if "_proj" in name
    }
    logits = _logits(checkpoint.path, quantization="fp8" if how == "online" else "auto")
    _assert_computes(logits, plain_logits(checkpoint.floats, fp8, TOKENS))
    errors = _errors(logits, bfloat16_logits)
    assert errors.max() < 0.2
    assert errors.min() > 0.02, "nothing was rounded"


def test_fp8_with_activations_in_bfloat16_is_no_further_from_floats(tmp_path: Path) -> None:
    """Workers compute with these: beside the 1/16 of e4m3, the 1/256 of bfloat16 does not count."""
    checkpoint = write_checkpoint(tmp_path, "block")
    logits = _logits(checkpoint.path, torch.bfloat16, cuts=(6,))
    assert _errors(logits, plain_logits(checkpoint.floats, {}, TOKENS)).max() < 0.2
    # Most inputs round to the same number; the others make the difference.
    assert _errors(logits, plain_logits(checkpoint.floats, checkpoint.fp8, TOKENS)).max() < 0.15


def _scales_of_kv() -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(scale)
        for layer, scales in KV_SCALES.items()
        for kind, scale in zip("kv", scales, strict=True)
    }


def test_a_kv_cache_in_e4m3_has_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """Rounding keys and values moves logits less than rounding all linears."""
    checkpoint = write_checkpoint(tmp_path, "online", _scales_of_kv())
    logits = _logits(checkpoint.path, quantization="none", kv_cache_dtype=torch.float8_e4m3fn)
    _assert_computes(logits, plain_logits(checkpoint.floats, {}, TOKENS, KV_SCALES))
    errors = _errors(logits, plain_logits(checkpoint.floats, {}, TOKENS))
    assert 0.005 < errors.median() < 0.1


def test_fp8_linears_and_a_kv_cache_in_e4m3_without_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_checkpoint(tmp_path, "tensor")
    ones = dict.fromkeys(range(LAYERS), (1.0, 1.0))
    logits = _logits(checkpoint.path, kv_cache_dtype=torch.float8_e4m3fn)
    _assert_computes(logits, plain_logits(checkpoint.floats, checkpoint.fp8, TOKENS, ones))
    warnings = [record.getMessage() for record in caplog.records if "k_scale" in record.getMessage()]
    assert len(warnings) == 1, "the warning comes for each layer"
    assert "kv_cache_dtype=auto" in warnings[0]


def test_experts_in_blocks_are_near_their_floats(tmp_path: Path) -> None:
    """Weights are the same and only inputs are rounded, an error of 3 to 10% here. Experts differ fourfold in
    magnitude, so a wrong expert's scales would cause more."""
    path = write_mixture(tmp_path)
    with_fp8, with_floats = (_logits(path, torch.bfloat16, how, cuts=(6,)) for how in ("auto", "none"))
    errors = _errors(with_fp8, with_floats)
    assert errors.max() < 0.15
    assert errors.min() > 0.01, "nothing was rounded"
    fp8, floats = (_load(path, torch.bfloat16, how, None).model.weight_bytes for how in ("auto", "none"))
    assert fp8 < 0.6 * floats


def test_weights_take_a_byte_each_and_the_head_two(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "tensor")
    head_and_embeddings = 2 * 2 * float_tensors()["lm_head.weight"].numel()
    model = _load(checkpoint.path, torch.bfloat16, "auto", None).model
    quantized = sum(values.numel() for values, _ in checkpoint.fp8.values())
    # A fused layer has one scale per output: 4 bytes beside 192.
    assert quantized + head_and_embeddings < model.weight_bytes < (quantized + head_and_embeddings) * 1.02
