"""Chooses the paragraphs of benchmarks/speculation/workloads.py: those with which SmolLM2 does what it is asked to do.

python -m benchmarks.speculation.choose        prints benchmarks/speculation/chosen.py; about 3 minutes
"""

import difflib
import textwrap

from benchmarks.speculation.workloads import (
    MAX_TOKENS,
    MODEL,
    NUM_PROMPTS,
    copied_share,
    correction_of,
    paragraphs,
    summary_of,
)
from octavo import SamplingParams
from octavo.client.results import Generation
from octavo.local.llm import LLM

# Lengths of paragraphs, in characters.
_LENGTHS = range(300, 1301)
_LEAST_ALIKE, _QUOTED_SHARE, _LEAST_SUMMARY = 0.9, (0.2, 0.8), 40


def main() -> None:
    llm = LLM(MODEL, dtype="bfloat16", worker_threads=2, max_num_seqs=64)
    texts = paragraphs()
    candidates = [index for index, text in enumerate(texts) if len(text) in _LENGTHS]

    def outputs(messages: list[str], max_tokens: int) -> list[Generation]:
        chats = [[{"role": "user", "content": message}] for message in messages]
        return llm.generate(chats, SamplingParams(temperature=0, max_tokens=max_tokens))

    edited = outputs([correction_of(texts[index]) for index in candidates], MAX_TOKENS["edit"])
    given_back = [
        index
        for index, output in zip(candidates, edited, strict=True)
        if difflib.SequenceMatcher(None, texts[index], output.text, autojunk=False).ratio() >= _LEAST_ALIKE
    ]
    summaries = outputs([summary_of(texts[index]) for index in candidates], MAX_TOKENS["quote"])
    low, high = _QUOTED_SHARE
    quoting = [
        index
        for index, output in zip(candidates, summaries, strict=True)
        if len(output.choices[0].token_ids) >= _LEAST_SUMMARY
        and low <= copied_share(output.prompt_token_ids, output.choices[0].token_ids) <= high
    ]
    print('"""Paragraphs of the workloads, by number. Made by `python -m benchmarks.speculation.choose`."""\n')
    print("\ndef _numbers(text: str) -> tuple[int, ...]:\n    return tuple(map(int, text.split()))\n\n")
    print(f"# {len(given_back)} of {len(candidates)} paragraphs come back, and {len(quoting)} are quoted.")
    for name, chosen in (("EDITED", given_back), ("QUOTED", quoting)):
        # Spread over the whole text.
        spread = [chosen[number * len(chosen) // NUM_PROMPTS] for number in range(NUM_PROMPTS)]
        lines = textwrap.wrap(" ".join(map(str, spread)), 112)
        print("\n".join([f'{name} = _numbers("""', *(f"    {line}" for line in lines), '""")']))


if __name__ == "__main__":
    main()
