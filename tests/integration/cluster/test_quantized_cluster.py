"""SmolLM2 in 8 and in 4 bits under `octavo up`: real processes, real weights, still the right answer."""

from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from tests.support.up import Up


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_knows_the_capital_of_france(tmp_path: Path, quantization: str) -> None:
    flags = (f"--quantization={quantization}", "--kv-cache-memory=0.1", "--max-num-seqs=4")
    with Up(tmp_path, *flags, real=True) as up:
        up.wait_for("serving; Ctrl-C to stop")
        with Client(f"localhost:{up.port}") as client:
            answer = client.chat("What is the capital of France? Answer briefly.", SamplingParams(temperature=0))
            assert answer.text == "The capital of France is Paris."
            assert client.model().quantization == quantization
