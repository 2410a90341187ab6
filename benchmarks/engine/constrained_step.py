"""Measures what constraints cost a worker on a CPU: steps of rows held to a schema beside steps of as many free rows.

    python -m benchmarks.engine.constrained_step [--batch 1,8,16,32,64] [--schema records,long_keys] [--json]

SmolLM2-135M, greedy rows of 16 tokens. Both kinds have rows of their own and take turns, so they meet the same machine;
a turn samples --tokens tokens a row, with the drafts that the worker proposes. Between two steps nothing else runs, so
masks have no time of their own: with a scheduler in between they have the time of its messages. Prints medians in
milliseconds a token of each row: `wall` is the time of the steps and of the masks after the last of them, `cpu` that of
all threads, `masks` the part of those that compute masks. `drafts` are the tokens that were drafts, of all.
"""

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.grammar.engines import MODEL, engine
from benchmarks.grammar.schemas import SCHEMAS
from kernels.native.cores import num_usable_cores, usable_cores
from octavo.bench.workload import random_prompts
from protos import inference_pb2, step_pb2
from runtime.model_files import resolve_model
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model
from worker.sampling.grammars import Grammars
from worker.step.rows import Rows

_BLOCK_SIZE, _PROMPT = 16, 16
FREE = "free"


@dataclass(slots=True)
class Group:
    """Rows of one kind."""

    kind: str
    rows: range
    num_tokens: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    num_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds for each token of each row."""

    wall: float
    cpu: float
    masks: float


class Bench:
    def __init__(self, loaded: LoadedModel, num_rows: int, length: int) -> None:
        vocab_size, eos = loaded.config.vocab_size, frozenset(loaded.config.eos_token_ids)
        num_blocks = num_rows * -(-length // _BLOCK_SIZE)
        grammars = Grammars(engine, version=engine().version, num_threads=num_usable_cores(), cores=usable_cores())
        self._rows = Rows(
            max_num_seqs=num_rows,
            max_num_batched_tokens=2048,
            max_model_len=length,
            block_size=_BLOCK_SIZE,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            eos_token_ids=eos,
            grammars=grammars,
        )
        kv_cache = KVCache(
            loaded.config, num_blocks=num_blocks + 1, block_size=_BLOCK_SIZE, backend=loaded.model.backend
        )
        self._runner = Runner(CpuExecutor(loaded.model), kv_cache, self._rows, inference_pb2.ModelInfo())
        self._blocks_per_row = -(-length // _BLOCK_SIZE)
        self._vocab_size, self._step = vocab_size, 0

    def start(self, group: Group, sampling: inference_pb2.SamplingParams) -> None:
        """Fills the group's rows, and samples each one's first token."""
        prompts = random_prompts(len(group.rows), _PROMPT, self._vocab_size, 1)
        new_rows = [
            step_pb2.NewRow(
                row=row,
                sequence=row + 1,
                token_ids=prompt,
                num_prompt_tokens=_PROMPT,
                sampling=sampling,
                block_ids=range(1 + row * self._blocks_per_row, 1 + (row + 1) * self._blocks_per_row),
            )
            for row, prompt in zip(group.rows, prompts, strict=True)
        ]
        group.num_tokens = dict.fromkeys(group.rows, 0)
        self._execute(group, new_rows=new_rows, rows=group.rows, num_tokens=[_PROMPT] * len(group.rows))

    def turn(self, group: Group, num_tokens: int) -> Turn:
        """Lets each of the group's rows sample so many tokens, or a few more by drafts."""
        goal = {row: count + num_tokens for row, count in group.num_tokens.items()}
        masks = _mask_seconds()
        start, cpu = time.perf_counter(), time.process_time()
        while late := [row for row, count in group.num_tokens.items() if count < goal[row]]:
            self._decode(group, late)
        # Masks begun for the next step count in this one.
        for each in self._rows.sampling.constrained.values():
            each.error  # noqa: B018
        end = time.perf_counter(), time.process_time()
        said = sum(group.num_tokens[row] - goal[row] + num_tokens for row in group.rows) / len(group.rows)
        return Turn(wall=(end[0] - start) / said, cpu=(end[1] - cpu) / said, masks=(_mask_seconds() - masks) / said)

    def _decode(self, group: Group, rows: Sequence[int]) -> None:
        drafted = [row for row in rows if group.drafts.get(row)]
        others = [row for row in rows if not group.drafts.get(row)]
        drafts = [group.drafts.pop(row) for row in drafted]
        self._execute(
            group,
            decode_rows=np.array(others, "<u2").tobytes(),
            rows_with_drafts=np.array(drafted, "<u2").tobytes(),
            num_drafts=np.array([len(each) for each in drafts], "<i4").tobytes(),
            draft_token_ids=np.array([*itertools.chain(*drafts)], "<i4").tobytes(),
        )

    def _execute(self, group: Group, **plan: Any) -> None:
        self._step += 1
        result = self._runner.execute(step_pb2.StepPlan(step=self._step, **plan))
        if result.failed_sequences:
            raise RuntimeError(f"{group.kind}: sequences {list(result.failed_sequences)} failed")
        sequences = np.frombuffer(result.sequences, "<i8").tolist()
        counts = np.frombuffer(result.num_tokens, "<i4").tolist() or [1] * len(sequences)
        for sequence, count in zip(sequences, counts, strict=True):
            group.num_tokens[sequence - 1] += count
            group.num_drafts += count - 1
        group.drafts = {each.sequence - 1: list(each.token_ids) for each in result.drafts}


def _mask_seconds() -> float:
    """CPU time of the threads that compute masks."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("masks"):
            total += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return total / 1e9


def measure(
    loaded: LoadedModel, schema: str, num_rows: int, num_turns: int, num_tokens: int
) -> dict[str, dict[str, float]]:
    """Returns medians in milliseconds by kind."""
    length = _PROMPT + (num_turns + 3) * (num_tokens + 64)
    bench = Bench(loaded, 2 * num_rows, length)
    constraint = inference_pb2.Constraint(json_schema=json.dumps(SCHEMAS[schema]))
    free, held = Group(FREE, range(num_rows)), Group(schema, range(num_rows, 2 * num_rows))
    bench.start(free, inference_pb2.SamplingParams(ignore_eos=True))
    bench.start(held, inference_pb2.SamplingParams(constraint=engine().canonical(constraint)))
    turns: dict[str, list[Turn]] = {FREE: [], schema: []}
    for number in range(num_turns + 2):
        # Neither is always first. The first turns allocate buffers and wake threads.
        for group in (free, held) if number % 2 else (held, free):
            turn = bench.turn(group, num_tokens)
            if number >= 2:
                turns[group.kind].append(turn)
    figures = {
        kind: {
            name: statistics.median(getattr(each, name) for each in found) * 1e3 for name in ("wall", "cpu", "masks")
        }
        for kind, found in turns.items()
    }
    figures[schema]["times"] = statistics.median(
        own.wall / other.wall for own, other in zip(turns[schema], turns[FREE], strict=True)
    )
    figures[schema]["drafts"] = held.num_drafts / sum(held.num_tokens.values())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,16,32,64", help="rows, comma-separated")
    parser.add_argument("--schema", default="records,long_keys", help=f"among {', '.join(SCHEMAS)}")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each row in a turn")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(resolve_model(MODEL), dtype=torch.bfloat16)
    if loaded.model.backend.native is not None:
        # As worker.cpu.build does.
        torch.set_num_threads(1)
        loaded.model.backend.native.bind_threads(usable_cores()[: arguments.threads])
    for schema, num_rows in itertools.product(arguments.schema.split(","), map(int, arguments.batch.split(","))):
        for kind, figures in measure(loaded, schema, num_rows, arguments.turns, arguments.tokens).items():
            rounded = {name: round(value, 3) for name, value in figures.items()}
            if arguments.json:
                print(json.dumps({"rows": num_rows, "kind": kind, **rounded}), flush=True)
            else:
                print(f"{num_rows:>4} {kind:>10}", *(f"{n} {v:.3f}" for n, v in rounded.items()), flush=True)


if __name__ == "__main__":
    main()
