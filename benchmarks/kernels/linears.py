"""Times linears of a model's shapes, with weights in floats, 8 and 4 bits: the C++ kernels beside oneDNN, in one run.

    python -m benchmarks.kernels.linears [--rows 1,8,32,64,512] [--shapes 576x960,...] [--threads 2] [--json]

The weights of each call are not in the CPU caches, as in a step of a model. The ways take turns, some calls each, with
a pause in which the threads of the last way go to sleep. Prints medians in microseconds and GFLOP/s.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from kernels.backend import Backend, native_backend, torch_backend
from kernels.cpu_backend import native_kernels
from kernels.linear import PackedLinear
from kernels.linear.weights import Int8Weight, Weight, num_groups, quantize_int4, quantize_int8

# SmolLM2-135M's: q, k and v; o; gate and up; down; head.
SHAPES = "576x960,576x576,576x3072,1536x576,576x49152"
# Bytes of all weights of one way: more than an L3 cache holds.
_BYTES = 100 * 2**20
_ROUNDS = 8


def ways(dtypes: list[torch.dtype]) -> dict[str, tuple[Backend, torch.dtype]]:
    """Returns the backends with the dtypes of their weights, by name."""
    kernels = native_kernels()
    found = {}
    if kernels is not None:
        for dtype in dtypes:
            path = native_backend(dtype, kernels)
            found[path.name] = (path, dtype)
    for dtype in dtypes:
        path = torch_backend(dtype)
        found[path.name] = (path, dtype)
    return found


def median_seconds(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of one call, by name."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            time.sleep(0.02)
            call()  # wakes the threads
            end = time.perf_counter() + seconds / _ROUNDS
            while (start := time.perf_counter()) < end or len(times[name]) < 3:
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def integer_weights(weight_OI: torch.Tensor) -> dict[str, Weight]:
    """Quantizes weights to each kind that is computed on integers, by name."""
    int8 = quantize_int8(weight_OI)
    groups = num_groups(weight_OI.shape[1])
    grouped = Int8Weight(values_OI=int8.values_OI, scales_OG=int8.scales_OG.half().repeat(1, groups))
    return {"int8": int8, "grouped-int8": grouped, "int4": quantize_int4(weight_OI)}


def cycle(backend: Backend, weight_OI: Weight, rows: int) -> Callable[[], None]:
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


def calls_of_shape(num_inputs: int, num_outputs: int, rows: int) -> dict[str, Callable[[], None]]:
    """Returns functions to time, by the name of the way, followed by the kind of integers if weights are integers."""
    weight_OI = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    named = ways([torch.float32, torch.bfloat16])
    calls = {name: cycle(path, weight_OI.to(dtype), rows) for name, (path, dtype) in named.items()}
    for name, (path, dtype) in named.items():
        if path.native is not None and dtype is torch.bfloat16:
            for kind, integers in integer_weights(weight_OI.to(dtype)).items():
                calls[f"{name}-{kind}"] = cycle(path, integers, rows)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,512")
    parser.add_argument("--shapes", default=SHAPES, help="inputs x outputs, comma-separated")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.4, help="for each way, shape and number of rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for rows in map(int, arguments.rows.split(",")):
        for shape in arguments.shapes.split(","):
            num_inputs, num_outputs = map(int, shape.split("x"))
            with torch.inference_mode():
                seconds = median_seconds(calls_of_shape(num_inputs, num_outputs, rows), arguments.seconds)
            gflop = 2 * rows * num_inputs * num_outputs / 1e9
            figures = {name: {"us": round(s * 1e6, 1), "gflop_s": round(gflop / s, 1)} for name, s in seconds.items()}
            if arguments.json:
                print(json.dumps({"rows": rows, "shape": shape, "threads": arguments.threads, **figures}), flush=True)
            else:
                print(f"{rows} rows, {shape}:", flush=True)
                for name, figure in figures.items():
                    print(f"  {name:<32} {figure['us']:>9.1f} us {figure['gflop_s']:>7.1f} GFLOP/s")


if __name__ == "__main__":
    main()
