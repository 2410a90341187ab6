"""Generates texts for a batch of prompts, in this process: python examples/offline_generation.py

Options of octavo.LLM can be given in the environment, such as OCTAVO_MODEL and OCTAVO_MAX_NUM_SEQS.
"""

from typing import Any

from octavo import LLM, Generation, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main(**options: Any) -> list[Generation]:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=16)
    with LLM(**options) as llm:
        results = llm.generate(PROMPTS, sampling)
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt!r} -> {result.text!r}")
    return results


if __name__ == "__main__":
    main()
