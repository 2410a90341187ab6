"""Asks several questions about one long document: python examples/automatic_prefix_caching.py

The first question computes the document; for the others its KV blocks are found in the prefix cache.
"""

import time
from typing import Any

from octavo import LLM, Generation, SamplingParams

PEOPLE = ["Alice", "Bob", "Carol", "Dave", "Eve", "Frank", "Grace", "Heidi"]
DOCUMENT = "Here are people and their ages:\n" + "\n".join(
    f"{number}: {PEOPLE[number % 8]} {chr(65 + number)}. is {20 + number * 7 % 50} years old." for number in range(26)
)
QUESTIONS = ["How old is Alice A.?", "How old is Bob B.?", "Who is the oldest?"]


def main(**options: Any) -> list[Generation]:
    results = []
    with LLM(**options) as llm:
        for question in QUESTIONS:
            start = time.perf_counter()
            prompt = f"{DOCUMENT}\nQuestion: {question}\nAnswer:"
            [result] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))
            seconds = time.perf_counter() - start
            assert result.usage is not None
            print(
                f"{question} {result.text!r}: {result.usage.cached_tokens} of {result.usage.prompt_tokens} prompt "
                f"tokens were cached, {seconds * 1e3:.0f} ms"
            )
            results.append(result)
    return results


if __name__ == "__main__":
    main()
