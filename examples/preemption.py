"""Runs more requests than the KV cache has room for: python examples/preemption.py

The scheduler preempts some of them: it takes their blocks and computes them again later. They lose time and no token.
With preemption_mode="swap" their KV is copied to host memory instead.
"""

from typing import Any

from octavo import LLM, Generation, SamplingParams

PROMPTS = [f"Write a story about the number {number}." for number in range(8)]
# Blocks of 16 tokens: room for two or three of the eight.
FEW_BLOCKS = 16


def main(**options: Any) -> dict[str, tuple[list[Generation], int]]:
    found = {}
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    few: dict[str, Any] = {"num_blocks_override": FEW_BLOCKS, "max_model_len": 128}
    for name, setting in {
        "enough memory": {},
        "recompute": few,
        "swap": few | {"preemption_mode": "swap", "swap_space": 0.1},
    }.items():
        with LLM(**options | setting) as llm:
            found[name] = llm.generate(PROMPTS, sampling), llm.num_preemptions
        print(f"{name}: {found[name][1]} preemptions; {found[name][0][0].text[:40]!r} ...")
    return found


if __name__ == "__main__":
    main()
