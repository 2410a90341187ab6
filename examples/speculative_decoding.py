"""Drafts tokens and verifies them, several in a step: python examples/speculative_decoding.py

Outputs are the same with any drafts; where a text repeats itself or its prompt, they come sooner.
"""

from typing import Any

from octavo import LLM, Generation, SamplingParams

PROMPT = "Repeat: one two three four five six seven eight.\nRepeat: one two three four five six seven eight.\nRepeat:"
SETTINGS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "suffix": {"speculative_config": {"method": "suffix"}},
}


def main(**options: Any) -> dict[str, Generation]:
    found = {}
    for name, setting in SETTINGS.items():
        with LLM(**options, **setting) as llm:
            [found[name]] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=64))
        usage = found[name].usage
        assert usage is not None
        print(f"{name}: {usage.accepted_draft_tokens} of {usage.draft_tokens} drafts were right; {found[name].text!r}")
    return found


if __name__ == "__main__":
    main()
