"""A model of hashes, and a runner of its steps that checks every plan. Needs no torch.

The next token is a pure function of (token ids so far, seed, choice). It is read from the KV cache, in which every slot
remembers the prefix it was written for. So any error of a scheduler in blocks, rows or positions either breaks an
assertion here or changes the tokens.
"""

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.options import Options
from protos import inference_pb2, step_pb2
from runtime.wire import octavo_version
from tests.fakes.encoder import FakeItems
from tests.fakes.socket_group import SocketGroup
from worker.errors import PlanError
from worker.step.runner import DoneResult

# The model never outputs ids below it, except EOS.
FIRST_TOKEN = 20
# A prompt with this token has logits that are not finite.
BAD_TOKEN = 7
# A step that computes a prompt with one of these raises, kills the process, or never ends; the latter two only if the
# worker is a process.
RAISING_TOKEN, DEADLY_TOKEN, ENDLESS_TOKEN = 8, 9, 10


def _extend(digest: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(digest + token_id.to_bytes(4, "little"), digest_size=8).digest()


def _extend_by_item(digest: bytes, name: bytes, place: int) -> bytes:
    return hashlib.blake2b(digest + name + place.to_bytes(4, "little"), digest_size=8).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HashModel:
    """eos_every: about one in this many tokens is EOS; 0: none."""

    vocab_size: int = 1000
    max_model_len: int = 512
    num_blocks: int = 128
    # Host blocks for swapped KV, if options.preemption_mode is swap.
    num_swap_blocks: int = 64
    eos_token_id: int = 2
    eos_every: int = 0
    fingerprint: str = "hashes"
    # Above 0: the model takes items.
    encoder_cache_size: int = 0

    def next_token(self, digest: bytes, seed: int, choice: int) -> int:
        drawn = int.from_bytes(hashlib.blake2b(b"%b/%d/%d" % (digest, seed, choice), digest_size=8).digest(), "little")
        if self.eos_every and drawn % self.eos_every == 0:
            return self.eos_token_id
        return FIRST_TOKEN + drawn % (self.vocab_size - FIRST_TOKEN)

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        seed: int = 0,
        choice: int = 0,
        ignore_eos: bool = False,
        items: Sequence[inference_pb2.ItemSpan] = (),
    ) -> list[int]:
        """A sequence's output, computed without any scheduling: up to `count` tokens, EOS included."""
        digest = b""
        names = {i: (item, i - item.first_token) for item in items for i in _positions(item)}
        for position, token_id in enumerate(prompt):
            if position in names:
                item, place = names[position]
                digest = _extend_by_item(digest, item.name, place)
            else:
                digest = _extend(digest, token_id)
        tokens: list[int] = []
        while len(tokens) < count and not (tokens and tokens[-1] == self.eos_token_id and not ignore_eos):
            tokens.append(self.next_token(digest, seed, choice))
            digest = _extend(digest, tokens[-1])
        return tokens

    def info(self, options: Options) -> inference_pb2.ModelInfo:
        return inference_pb2.ModelInfo(
            name=options.served_model_name,
            architecture="hashes",
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=[self.eos_token_id],
            dtype="float32",
            block_size=options.block_size,
            num_blocks=options.num_blocks_override or self.num_blocks,
            octavo_version=octavo_version(),
            media_json='{"name": "hashes"}' if self.encoder_cache_size else "",
        )


def _positions(item: inference_pb2.ItemSpan | step_pb2.RowItem) -> range:
    return range(item.first_token, item.first_token + item.num_tokens)


@dataclass(slots=True)
class _Row:
    sequence: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: inference_pb2.SamplingParams
    choice: int
    # Number and place, by position.
    items: dict[int, tuple[int, int]]


def _fail() -> None:
    raise RuntimeError("this prompt can't be computed")


# What such a step does if the worker is a process.
POISONS: dict[int, Callable[[], object]] = {
    RAISING_TOKEN: _fail,
    # As the operating system does when memory runs out.
    DEADLY_TOKEN: lambda: os.kill(os.getpid(), signal.SIGKILL),
    ENDLESS_TOKEN: lambda: threading.Event().wait(),
}


@dataclass
class HashRunner:
    """Computes plans and checks every promise of step.proto. before_step: called with each plan; may block."""

    model: HashModel
    options: Options
    before_step: Callable[[step_pb2.StepPlan], None] = lambda plan: None
    # By prompt token: what a step that computes it does.
    poisons: Mapping[int, Callable[[], object]] = field(default_factory=lambda: {RAISING_TOKEN: _fail})
    num_steps: int = 0
    # Errors found in plans, over all epochs.
    violations: list[str] = field(default_factory=list)
    holds_constrained: bool = False
    drafter: str = ""
    # Encodes items, if it is a rank of the first stage.
    items: FakeItems | None = None

    def __post_init__(self) -> None:
        self.model_info = self.model.info(self.options)
        if self.model.encoder_cache_size:
            self.items = FakeItems(self.model.encoder_cache_size)
        self._group: SocketGroup | None = None
        self.reset()

    @property
    def num_swap_blocks(self) -> int:
        return self.model.num_swap_blocks if self.options.preemption_mode == "swap" else 0

    @property
    def num_live_rows(self) -> int:
        return len(self._rows)

    def reset(self) -> None:
        self._rows: dict[int, _Row] = {}
        # The prefix that each slot was written for; _host: of each host block, by offset.
        self._kv: dict[int, bytes] = {}
        self._host: dict[int, dict[int, bytes]] = {}
        self._sequences: set[int] = set()
        if self.items is not None:
            self.items.reset()

    def join(self, groups: Any, while_waiting: object = None) -> None:
        """groups: a SocketGroup or None. It has no calls on tensors, because there are no tensors."""
        if self._group is not None:
            self._group.leave()
        self._group = groups

    def begin(self, plan: step_pb2.StepPlan) -> DoneResult:
        return DoneResult(self.execute(plan))

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        self.before_step(plan)
        num_tokens_of_all = 0
        if self._group is not None:
            num_tokens_of_all = self._group.meet_in_step(plan.step, len(plan.decode_rows) // 2 + sum(plan.num_tokens))
        try:
            result = self._execute(plan)
            if self.options.in_lockstep:
                result.num_tokens_of_all = num_tokens_of_all // self.options.world_size
            else:
                assert plan.decode_rows or plan.rows, "an empty step"
        except AssertionError as error:
            self.violations.append(f"step {plan.step}: {error}")
            raise PlanError(str(error)) from error
        self.num_steps += 1
        return result

    def _execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        for row in plan.freed_rows:
            assert self._rows.pop(row, None), f"freed_rows: {row} holds nothing"
        self._swap(plan)
        for new in plan.new_rows:
            self._take_row(new)
        for row, count in zip(plan.trimmed_rows, plan.num_kept_blocks, strict=True):
            assert count <= len(self._rows[row].block_ids), "num_kept_blocks: more than there are"
            del self._rows[row].block_ids[count:]
        self._grow(plan)
        if self.items is not None:
            self.items.apply(plan)
        scheduled = [(row, 1) for row in np.frombuffer(plan.decode_rows, "<u2").tolist()]
        for row, _ in scheduled:
            held = self._rows[row]
            assert held.num_computed_tokens == len(held.token_ids) - 1, "decode_rows: more than one to compute"
        scheduled += zip(plan.rows, plan.num_tokens, strict=True)
        assert len({row for row, _ in scheduled}) == len(scheduled), "rows: one occurs twice"
        num_tokens = sum(count for _, count in scheduled)
        assert num_tokens <= self.options.max_num_batched_tokens, "num_tokens: beyond the budget"
        assert not plan.rows_with_drafts, "rows_with_drafts: this worker has no drafts"
        result = step_pb2.StepResult(epoch=plan.epoch, step=plan.step)
        starts = {row: self._rows[row].num_computed_tokens for row, _ in scheduled}
        for row, count in scheduled:
            self._write(self._rows[row], count)
            for token_id in self.poisons.keys() & self._rows[row].token_ids:
                self.poisons[token_id]()
        said: list[tuple[int, int, int]] = []
        for row, _ in scheduled:
            self._add_prompt_logprobs(self._rows[row], starts[row], result)
            said += self._sample(self._rows[row], result)
        result.sequences = np.array([sequence for sequence, _, _ in said], "<i8").tobytes()
        result.positions = np.array([position for _, position, _ in said], "<i4").tobytes()
        result.token_ids = np.array([token_id for _, _, token_id in said], "<i4").tobytes()
        return result

    def _swap(self, plan: step_pb2.StepPlan) -> None:
        size, hosts = self.options.block_size, range(self.num_swap_blocks)
        for block, host in zip(plan.swap_out_blocks, plan.swap_out_host_blocks, strict=True):
            assert host in hosts, f"swap_out_host_blocks: {host} is out of range"
            self._host[host] = {i: self._kv[block * size + i] for i in range(size) if block * size + i in self._kv}
        for host, block in zip(plan.swap_in_host_blocks, plan.swap_in_blocks, strict=True):
            assert host in self._host, f"swap_in_host_blocks: {host} holds nothing"
            for i in range(size):
                self._kv.pop(block * size + i, None)
            self._kv.update({block * size + i: digest for i, digest in self._host[host].items()})
        self._check_blocks([*plan.swap_out_blocks, *plan.swap_in_blocks])

    def _take_row(self, new: step_pb2.NewRow) -> None:
        assert new.row not in self._rows, f"new_rows: {new.row} is taken"
        assert new.row < self.options.max_num_seqs, f"new_rows: {new.row} is beyond max_num_seqs"
        assert new.sequence not in self._sequences, f"sequence: {new.sequence} came before"
        assert 0 <= new.num_computed_tokens < len(new.token_ids), "num_computed_tokens: nothing is left to compute"
        assert 1 <= new.num_prompt_tokens <= len(new.token_ids), "num_prompt_tokens: out of range"
        self._check_blocks(new.block_ids)
        self._sequences.add(new.sequence)
        row = self._rows[new.row] = _Row(
            new.sequence,
            list(new.token_ids),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids),
            new.sampling,
            new.choice,
            {i: (item.number, i - item.first_token) for item in new.items for i in _positions(item)},
        )
        assert len(row.block_ids) * self.options.block_size >= row.num_computed_tokens, "block_ids: too few"

    def _grow(self, plan: step_pb2.StepPlan) -> None:
        assert sum(plan.num_new_blocks) == len(plan.new_blocks), "new_blocks: another number than num_new_blocks says"
        self._check_blocks(plan.new_blocks)
        blocks = iter(plan.new_blocks)
        for row, count in zip(plan.grown_rows, plan.num_new_blocks, strict=True):
            self._rows[row].block_ids += [next(blocks) for _ in range(count)]

    def _check_blocks(self, block_ids: Iterable[int]) -> None:
        assert all(1 <= block <= self.model_info.num_blocks for block in block_ids), "block ids: out of range"

    def _slot(self, row: _Row, position: int) -> int:
        size = self.options.block_size
        assert position // size < len(row.block_ids), "block_ids: too few for the tokens of this step"
        return row.block_ids[position // size] * size + position % size

    def _digest(self, row: _Row, num_tokens: int) -> bytes:
        return self._kv[self._slot(row, num_tokens - 1)] if num_tokens else b""

    def _write(self, row: _Row, count: int) -> None:
        end = row.num_computed_tokens + count
        assert 1 <= count <= len(row.token_ids) - row.num_computed_tokens, "num_tokens: more than there are"
        expected = b""
        for position in range(row.num_computed_tokens):
            expected = self._extended(expected, row, position, is_computed=True)
            assert self._kv.get(self._slot(row, position)) == expected, f"position {position} holds another prefix's KV"
        for position in range(row.num_computed_tokens, end):
            expected = self._extended(expected, row, position, is_computed=False)
            self._kv[self._slot(row, position)] = expected
        row.num_computed_tokens = end

    def _extended(self, digest: bytes, row: _Row, position: int, *, is_computed: bool) -> bytes:
        """The digest of the prefix up to a position. is_computed: it is in the KV cache already."""
        if position not in row.items:
            return _extend(digest, row.token_ids[position])
        assert self.items is not None, "items: this rank encodes none"
        number, place = row.items[position]
        name = self.items.name_of(number) if is_computed else self.items.embeddings(number)
        # An item that was never sent here in this epoch: its tokens were found in the prefix cache.
        return self._kv[self._slot(row, position)] if name is None else _extend_by_item(digest, name, place)

    def _sample(self, row: _Row, result: step_pb2.StepResult) -> list[tuple[int, int, int]]:
        """(sequence, position, token) if the row samples."""
        if row.num_computed_tokens < len(row.token_ids):
            return []
        token_id = self.model.next_token(self._digest(row, row.num_computed_tokens), row.sampling.seed, row.choice)
        position = len(row.token_ids) - row.num_prompt_tokens
        row.token_ids.append(token_id)
        if BAD_TOKEN in row.token_ids[: row.num_prompt_tokens]:
            result.failed_sequences.append(row.sequence)
            return []
        if row.sampling.HasField("logprobs"):
            result.logprobs.append(_logprobs(token_id, row.sampling.logprobs))
        return [(row.sequence, position, token_id)]

    def _add_prompt_logprobs(self, row: _Row, start: int, result: step_pb2.StepResult) -> None:
        first, end = max(start, 1), min(row.num_computed_tokens, row.num_prompt_tokens)
        if row.sampling.HasField("prompt_logprobs") and first < end:
            frame = inference_pb2.PromptLogprobs(first_position=first)
            frame.logprobs.extend(_logprobs(token, row.sampling.prompt_logprobs) for token in row.token_ids[first:end])
            result.prompt_logprobs.add(sequence=row.sequence, frame=frame)


def _logprobs(token_id: int, num_top: int) -> inference_pb2.TokenLogprobs:
    """Made-up logprobs that depend only on the token."""
    chosen = inference_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 1000, rank=1)
    top = [inference_pb2.TokenLogprob(token_id=token_id + i, logprob=-i, rank=i + 1) for i in range(num_top)]
    return inference_pb2.TokenLogprobs(chosen=chosen, top=top)
