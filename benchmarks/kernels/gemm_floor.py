"""The speed that SmolLM2-135M would have if it were only its linears, each computed by the fastest way measured now."""

from collections.abc import Sequence

import torch

from benchmarks.kernels.linears import cycle, median_seconds, ways
from worker.weights.quantization.kinds import Quantization, head_quantization, quantized

LAYERS = 30
# Inputs x outputs: q, k and v; o; gate and up; down.
LAYER_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
HEAD_SHAPE = (576, 49152)
# Approximate number of prompt tokens that are computed at a time.
PROMPT_ROWS = 512
_SECONDS = 0.3


class GemmFloor:
    """The floor for one dtype and quantization, on torch's number of threads."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization, rows: Sequence[int]) -> None:
        """rows: numbers of concurrent sequences, for output_rate."""
        self._dtype = dtype
        self._quantization: Quantization = quantization
        with torch.inference_mode():
            # Without the head, which is computed only for a prompt's last token.
            self.prompt_seconds = self._layers(PROMPT_ROWS) / PROMPT_ROWS
            self._token_seconds = {number: (self._layers(number) + self._head(number)) / number for number in rows}

    def output_rate(self, rows: int, prompt: int, output: int) -> float:
        """Output tokens/s of `rows` concurrent requests; computing their prompts counts."""
        return 1 / (self._token_seconds[rows] + self.prompt_seconds * prompt / output)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens/s."""
        return 1 / self.prompt_seconds

    def _layers(self, rows: int) -> float:
        return LAYERS * sum(self._fastest(shape, rows, self._quantization) for shape in LAYER_SHAPES)

    def _head(self, rows: int) -> float:
        return self._fastest(HEAD_SHAPE, rows, head_quantization(self._quantization))

    def _fastest(self, shape: tuple[int, int], rows: int, quantization: Quantization) -> float:
        num_inputs, num_outputs = shape
        weight = (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(self._dtype)
        calls = {name: cycle(path, weight, rows) for name, (path, _) in ways([self._dtype]).items()}
        if quantization != "none":
            few_bits = quantized(weight, quantization)
            for name, (path, _) in ways([self._dtype]).items():
                calls[f"{name}-{quantization}"] = cycle(path, few_bits, rows)
        return min(median_seconds(calls, _SECONDS).values())
