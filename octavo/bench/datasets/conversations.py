"""Requests of a file with texts: ShareGPT's conversations, or one JSON object per line with a prompt.

Known forms of an entry, as JSON lines or as one JSON array:

    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}     ShareGPT's
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "output_tokens": 64}                                                     vLLM's custom dataset
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.datasets.request import BenchRequest, DatasetError

# For texts whose tokens nobody counted: English has about this many characters in a token.
CHARACTERS_A_TOKEN = 4
# Shorter ones measure nothing, as in vLLM's benchmark.
_LEAST_TOKENS = 4

CountTokens = Callable[[str], int]


def estimated_tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_A_TOKEN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The first question of each conversation, with an output as long as its answer, in an order drawn by the seed."""

    path: Path
    # None: the length of the answer.
    output_len: int | None = None
    count_tokens: CountTokens = estimated_tokens
    name: str = "sharegpt"
    is_drawn: bool = False

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        found: list[BenchRequest] = []
        entries = list(_entries(self.path))
        for index in np.random.default_rng(seed).permutation(len(entries)).tolist():
            if len(found) == count:
                break
            where, entry = entries[index]
            prompt, answer, length = _read(entry, where)
            output_len = self.output_len or length or (self.count_tokens(answer) if answer else 0)
            if not output_len:
                raise DatasetError(f"{where} has neither an answer nor output_tokens: give --output-len")
            prompt_len = self.count_tokens(prompt)
            if min(prompt_len, output_len) >= _LEAST_TOKENS:
                found.append(BenchRequest(prompt=prompt, prompt_len=prompt_len, output_len=output_len))
        if not found:
            raise DatasetError(f"{self.path} has no conversation whose question and answer have {_LEAST_TOKENS} tokens")
        return found


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields entries with their places."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise DatasetError(f"{path} is not valid JSON: {error}") from None
        yield from ((f"{path}, entry {number}", entry) for number, entry in enumerate(listed, 1))
        return
    yield from json_lines(path, text)


def json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yields the value of each line that is not empty, with its place. Raises DatasetError."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{where} is not valid JSON: {error}") from None


def read_text(path: Path) -> str:
    """Raises DatasetError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"--dataset-path: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"--dataset-path: {path} is not a text file in UTF-8") from None


def _read(entry: Any, where: str) -> tuple[str, str, int]:
    """Returns question, answer and the output's length; the last two may be empty."""
    if isinstance(entry, dict):
        for turns, text in (("conversations", "value"), ("messages", "content")):
            found = entry.get(turns)
            if isinstance(found, list):
                words = [turn.get(text) for turn in found if isinstance(turn, dict)]
                texts = [each for each in words if isinstance(each, str)]
                if texts and len(texts) == len(words):
                    return texts[0], texts[1] if len(texts) > 1 else "", 0
        prompt, length = entry.get("prompt"), entry.get("output_tokens", entry.get("output_len", 0))
        if isinstance(prompt, str) and isinstance(length, int) and length >= 0:
            return prompt, str(entry.get("completion") or ""), length
    raise DatasetError(
        f"{where} is none of the known forms: "
        '{"conversations": [{"value": ...}, ...]}, {"messages": [{"content": ...}, ...]} '
        'or {"prompt": ..., "output_tokens": N}'
    )
