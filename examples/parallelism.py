"""Computes with one worker and with two, which give the same outputs: python examples/parallelism.py

tensor_parallel_size: workers that share each layer. pipeline_parallel_size: stages, each with some of the layers.
data_parallel_size: replicas, among which requests are divided. LLM starts the workers and ends them.
"""

from typing import Any

from octavo import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The largest planet is"]
# Also: {"data_parallel_size": 2}; {"tensor_parallel_size": 3}, which must divide the model's heads; or several of them.
SETTINGS: dict[str, dict[str, Any]] = {"one worker": {}, "two workers": {"pipeline_parallel_size": 2}}


def main(**options: Any) -> dict[str, list[str]]:
    sampling = SamplingParams(temperature=0, max_tokens=16)
    found = {}
    for name, setting in SETTINGS.items():
        # Sums of several tensor parallel workers are rounded elsewhere than those of one; in float32 no token changes.
        with LLM(**{"dtype": "float32"} | options | setting) as llm:
            found[name] = [result.text for result in llm.generate(PROMPTS, sampling)]
        print(f"{name}: {found[name]}")
    return found


if __name__ == "__main__":
    main()
