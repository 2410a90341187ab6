"""Llama-3.1-8B with random weights in vLLM: decodes of 1, 64 and 256 rows at context 512, and a prefill of 8 x 1,024.

    python -m benchmarks.gpu.vllm.measure fp8|bf16

Prints a line of JSON for each. The time of a decode step is the difference between generations of 72 and of 8 tokens
over 64, so that it has no prefill in it. Has not run: it needs a GPU.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_OPTIONS: dict[str, dict[str, Any]] = {"fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"}, "bf16": {}}
_CONTEXT, _FEW, _MANY = 512, 8, 72


def main() -> int:
    parser = argparse.ArgumentParser(description="Times vLLM with random weights.")
    parser.add_argument("variant", choices=_OPTIONS)
    variant = parser.parse_args().variant
    from vllm import LLM  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG))
        begin = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            **_OPTIONS[variant],
        )
        _print(variant, "start", seconds=time.perf_counter() - begin)
        # Compiles what is left.
        _generate(llm, 4, _CONTEXT, _FEW)
        for num_rows in (1, 256, 64):
            few, many = (min(_generate(llm, num_rows, _CONTEXT, length) for _ in range(2)) for length in (_FEW, _MANY))
            seconds = (many - few) / (_MANY - _FEW)
            _print(variant, f"decode, {num_rows} x {_CONTEXT}", ms=seconds * 1e3, tokens_per_s=num_rows / seconds)
        seconds = min(_generate(llm, 8, 1024, 1) for _ in range(3))
        _print(variant, "prefill, 8 x 1024", ms=seconds * 1e3, prompt_tokens_per_s=8 * 1024 / seconds)
    return 0


def _generate(llm: Any, num_rows: int, context: int, num_outputs: int) -> float:
    """Seconds of generating so many tokens for each of the rows."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    prompts = [
        {"prompt_token_ids": [(row * 7919 + place) % 128000 for place in range(context)]} for row in range(num_rows)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(output.outputs[0].token_ids) == num_outputs for output in outputs)
    return seconds


def _print(variant: str, case: str, **figures: float) -> None:
    print(json.dumps({"model": f"Llama-3.1-8B {variant}", "case": case, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
