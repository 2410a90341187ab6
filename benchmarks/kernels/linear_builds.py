"""Compares builds of a path's C++ kernels, such as those before and after a change, by the CPU time of one thread.

    python -m benchmarks.kernels.linear_builds OLD.so NEW.so [--path amx-bf16] [--quantization int8]
        [--rows 1,8,16,64,300] [--layers 12] [--seconds 1]

Computes the linears of SmolLM2's layers, each layer with weights of its own. The builds take turns; other work on the
machine lengthens their time, but hardly their CPU time. Prints milliseconds, the least and the median of the turns, and
their ratios to the first build's. A build must know all kinds of weights that this checkout packs. The cache
directory has the libraries (OCTAVO_CACHE_DIR or ~/.cache/octavo).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.backend import native_backend
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight, quantize_int4, quantize_int8
from kernels.native.build import PATHS, flags_of_this_cpu
from kernels.native.library import NativeKernels

# Inputs, weight rows, gated: q, k and v; o; gate and up; down. The second and the last are added to the residual.
_SHAPES = ((576, 960, False), (576, 576, False), (576, 3072, True), (1536, 576, False))
_QUANTIZE: dict[str, Callable[[torch.Tensor], Weight]] = {
    "none": torch.Tensor.bfloat16,
    "int8": quantize_int8,
    "int4": quantize_int4,
}


class Stack:
    """The linears of some layers, computed by one build."""

    def __init__(self, kernels: NativeKernels, weights: list[Weight], num_layers: int) -> None:
        backend, norm_I = native_backend(torch.bfloat16, kernels), torch.ones(576)
        kernels.set_threads(1)
        self._layers = [
            [
                PackedLinear(weight, None, backend, norm_I=norm_I if number % 2 == 0 else None, eps=1e-5, gated=gated)
                for number, (weight, (_, _, gated)) in enumerate(zip(weights, _SHAPES, strict=True))
            ]
            for _ in range(num_layers)
        ]

    def cpu_ms(self, x: dict[int, torch.Tensor], y: list[torch.Tensor]) -> float:
        start = time.thread_time()
        for layer in self._layers:
            for number, linear in enumerate(layer):
                if number % 2:
                    linear.add_to_(y[number], x[_SHAPES[number][0]])
                else:
                    linear(x[_SHAPES[number][0]], out=y[number])
        return (time.thread_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--path", choices=[path.name for path in PATHS], default=PATHS[0].name)
    parser.add_argument("--quantization", choices=tuple(_QUANTIZE), default="none")
    parser.add_argument("--rows", default="1,8,16,64,300", help="comma-separated")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each build and number of rows")
    arguments = parser.parse_args()
    path = next(path for path in PATHS if path.name == arguments.path)
    if not path.cpu_flags <= flags_of_this_cpu():
        parser.error(f"--path {path.name}: this CPU lacks {', '.join(sorted(path.cpu_flags - flags_of_this_cpu()))}")
    torch.set_num_threads(1)
    quantize = _QUANTIZE[arguments.quantization]
    weights = [quantize(torch.randn(outputs, inputs) * inputs**-0.5) for inputs, outputs, _ in _SHAPES]
    stacks = [Stack(NativeKernels(path, library), weights, arguments.layers) for library in arguments.libraries]
    for rows in map(int, arguments.rows.split(",")):
        x = {inputs: torch.randn(rows, inputs) for inputs, _, _ in _SHAPES}
        y = [torch.zeros(rows, outputs // 2 if gated else outputs) for _, outputs, gated in _SHAPES]
        taken = [list[float]() for _ in stacks]
        end, turn = time.perf_counter() + arguments.seconds * len(stacks), 0
        while time.perf_counter() < end or turn < 3:
            order = range(len(stacks))
            for number in order if turn % 2 else reversed(order):
                taken[number].append(stacks[number].cpu_ms(x, y))
            turn += 1
        least, median = [min(each) for each in taken], [statistics.median(each) for each in taken]
        shown = "".join(
            f"  {a:8.2f} {b:8.2f} x{a / least[0]:.2f} x{b / median[0]:.2f}" for a, b in zip(least, median, strict=True)
        )
        print(f"{path.name} {arguments.quantization} {rows:>5} rows, {turn:>3} turns:{shown}", flush=True)


if __name__ == "__main__":
    main()
