"""Requests of a trace that `octavo up --trace` recorded: the same tokens, at the same times, with outputs as long."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.bench.datasets.request import BenchRequest, DatasetError
from octavo.plan.recorded import read_recording


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
