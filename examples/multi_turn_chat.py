"""Holds a conversation of several turns: python examples/multi_turn_chat.py

Each turn sends all that was said before. The prefix cache has the KV of it, so only what is new is computed.
"""

from collections.abc import Sequence
from typing import Any

from octavo import LLM, Generation, SamplingParams

QUESTIONS = ["My name is Ada. Please greet me.", "What is my name?", "Thank you!"]


def main(questions: Sequence[str] = QUESTIONS, **options: Any) -> list[Generation]:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a helpful assistant. Answer briefly."}]
    answers = []
    with LLM(**options) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))
            messages.append({"role": "assistant", "content": answer.text})
            assert answer.usage is not None
            print(f"user: {question}\nassistant: {answer.text}  [{answer.usage.cached_tokens} tokens were cached]")
            answers.append(answer)
    return answers


if __name__ == "__main__":
    main()
