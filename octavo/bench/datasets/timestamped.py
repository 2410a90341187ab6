"""Requests of traces, at their times: those that Mooncake publishes, and those that `octavo up --trace` recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.backends.base import Prompt
from octavo.bench.datasets.conversations import json_lines, read_text
from octavo.bench.datasets.request import BenchRequest, DatasetError
from octavo.bench.datasets.synthetic import drawn, joined
from octavo.plan.recorded import read_recording

_TOKENS_A_BLOCK = 512
# Beside a block's number in its seed; requests without hash_ids have seeds of their own.
_BLOCKS, _OWN = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampedTrace:
    """The first requests of a trace, at their times. length_scale: factor of all lengths, for models and machines
    smaller than the recorded ones."""

    path: Path
    length_scale: float = 1.0
    name: str = "mooncake"
    is_drawn: bool = False

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        rows = [_read(entry, where) for where, entry in json_lines(self.path, read_text(self.path))]
        if not rows:
            raise DatasetError(f"{self.path} has no request: give one JSON object per line")
        rows.sort(key=lambda row: row[0])
        start = rows[0][0]
        return [
            BenchRequest(
                prompt=self._prompt(
                    index, max(1, round(length * self.length_scale)), blocks, seed, vocab_size, as_text
                ),
                prompt_len=max(1, round(length * self.length_scale)),
                output_len=max(1, round(output * self.length_scale)),
                at=(milliseconds - start) / 1e3,
            )
            for index, (milliseconds, length, output, blocks) in enumerate(rows[:count])
        ]

    def _prompt(self, index: int, length: int, blocks: list[int], seed: int, vocab_size: int, as_text: bool) -> Prompt:
        size = max(1, round(_TOKENS_A_BLOCK * self.length_scale))
        prompt: Prompt = "" if as_text else []
        left = length
        for block in blocks:
            taken = min(size, left)
            if taken:
                # A part of a block is its beginning: so draws all of it.
                piece = drawn(np.random.default_rng((seed, _BLOCKS, block)), size, vocab_size, as_text)
                piece = " ".join(piece.split(" ")[:taken]) if isinstance(piece, str) else piece[:taken]
                prompt = joined(prompt, piece) if prompt else piece
                left -= taken
        if left:
            rest = drawn(np.random.default_rng((seed, _OWN, index)), left, vocab_size, as_text)
            prompt = joined(prompt, rest) if prompt else rest
        return prompt


def _read(entry: Any, where: str) -> tuple[float, int, int, list[int]]:
    try:
        row = float(entry["timestamp"]), int(entry["input_length"]), int(entry["output_length"])
        blocks = [int(block) for block in entry.get("hash_ids") or ()]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DatasetError(
            f"{where} is not a request ({error!r}): give timestamp in milliseconds, input_length and output_length"
        ) from None
    if row[0] < 0 or min(row[1:]) < 1 or min(blocks, default=0) < 0:
        raise DatasetError(f"{where}: timestamp and hash_ids are from 0 up, and lengths from 1 up")
    return *row, blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrace:
    """The first requests of the trace. Each choice is a request of its own."""

    paths: Sequence[Path]
    name: str = "trace"
    is_drawn: bool = False

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        if as_text:
            raise DatasetError("--dataset=trace: a trace has token ids and no text: use --backend grpc or openai")
        found = read_recording(self.paths).requests[:count]
        return [
            BenchRequest(
                prompt=list(each.prompt),
                prompt_len=len(each.prompt),
                output_len=len(each.output),
                at=each.arrival - found[0].arrival,
            )
            for each in found
        ]
