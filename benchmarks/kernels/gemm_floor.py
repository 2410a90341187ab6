"""The speed that SmolLM2-135M would have if it were only its linears, each computed by the fastest way measured now."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kernels.backend import Backend, native_backend, torch_backend
from kernels.cpu_backend import native_kernels
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight
from worker.weights.quantization.kinds import Quantization, head_quantization, quantized

LAYERS = 30
# Inputs x outputs: q, k and v; o; gate and up; down.
LAYER_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
HEAD_SHAPE = (576, 49152)
# Approximate number of prompt tokens that are computed at a time.
PROMPT_ROWS = 512
_SECONDS = 0.3
# Bytes of all weights of one way: more than an L3 cache holds, as in a step of a model.
_BYTES = 100 * 2**20
_ROUNDS = 8


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
        weights: dict[str, Weight] = {"none": weight}
        if quantization != "none":
            weights[quantization] = quantized(weight, quantization)
        calls = {
            f"{path.name}-{kind}": _cycle(path, values, rows)
            for kind, values in weights.items()
            for path in _backends(self._dtype)
        }
        return min(_median_seconds(calls).values())


def _backends(dtype: torch.dtype) -> list[Backend]:
    kernels = native_kernels()
    own = [] if kernels is None else [native_backend(dtype, kernels)]
    return [*own, torch_backend(dtype)]


def _cycle(backend: Backend, weight_OI: Weight, rows: int) -> Callable[[], None]:
    """Returns a function that computes one layer a call, in turn, of enough layers to fill _BYTES."""
    layers = [PackedLinear(weight_OI, None, backend)]
    while sum(layer.num_bytes for layer in layers) < _BYTES:
        layers.append(PackedLinear(weight_OI, None, backend))
    shape = weight_OI.shape if isinstance(weight_OI, torch.Tensor) else weight_OI.values_OI.shape
    x_TI = torch.randn(rows, shape[1]).to(backend.compute_dtype)
    number = 0

    def call() -> None:
        nonlocal number
        layers[number](x_TI)
        number = (number + 1) % len(layers)

    return call


def _median_seconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of one call, by name. The ways take turns, with a pause in which the threads of the last way go to
    sleep."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            time.sleep(0.02)
            call()  # wakes the threads
            end = time.perf_counter() + _SECONDS / _ROUNDS
            while (start := time.perf_counter()) < end or len(times[name]) < 3:
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}
