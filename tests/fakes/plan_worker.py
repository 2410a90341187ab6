"""A worker without weights that takes the core's own Plan objects, carries them out and checks step.proto's promises.

KV blocks hold the digest of the prefix that each slot was written for. Every read is checked, so an error of
scheduling in blocks, rows, positions, swaps or drafts is found in the very step where it happens.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler.core.messages import ItemSpan, Plan, PlannedRow, Result, WantedItem
from tests.fakes.items import with_embeddings
from tests.fakes.model import FakeSampling, extend_digest, logprobs_of, next_token, num_forced

Digests = list[int | None]
# Maps the tokens that would really come next to a drafter's guesses.
Drafter = Callable[[list[int]], tuple[int, ...]]


@dataclass(slots=True)
class WorkerRow:
    sequence: int
    choice: int
    sampling: FakeSampling
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    # Entry i is the digest of the first i tokens.
    digests: list[int]
    has_sampled: bool = False
    # Its logits were not finite, so its samples have no meaning.
    has_failed: bool = False
    items: list[tuple[int, ItemSpan]] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_lacking(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    def extend(self, token_ids: Iterable[int], seen: Iterable[int] | None = None) -> None:
        """seen: the tokens as a model sees them; None: as they are."""
        self.token_ids += token_ids
        for token_id in token_ids if seen is None else seen:
            self.digests.append(extend_digest(self.digests[-1], token_id))

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:]
        del self.digests[num_tokens + 1 :]


@dataclass(slots=True)
class _Sampled:
    """The columns of a result, while it is collected."""

    sequences: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def result(self, step: int) -> Result:
        return Result(
            step=step,
            sequences=np.array(self.sequences, np.int64),
            positions=np.array(self.positions, np.int32),
            num_tokens=None if all(count == 1 for count in self.counts) else np.array(self.counts, np.int32),
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=self.logprobs,
            drafts=self.drafts,
            failed=frozenset(self.failed),
        )


class PlanWorker:
    """All ranks of one epoch. Plans run in order, when they are made; their results may be delivered later."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_swap_blocks: int = 0,
        encoder_cache_size: int = 0,
    ) -> None:
        self.encoder_cache_size = encoder_cache_size
        # Items by number: those that are to be prepared or are, and those whose embeddings are in the cache.
        self.inputs: dict[int, WantedItem] = {}
        self.embeddings: dict[int, WantedItem] = {}
        # Numbers of the inputs that are prepared.
        self.prepared: set[int] = set()
        self._name_of: dict[int, bytes] = {}
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step = 0
        self.rows: dict[int, WorkerRow] = {}
        # Blocks that the last step began to write or swapped in, so that their old content is gone.
        self.renewed: set[int] = set()
        self._kv: Digests = [None] * ((num_blocks + 1) * block_size)
        self._host: dict[int, Digests] = {}
        self._seen: set[int] = set()

    def run(self, plan: Plan, *, failing: Collection[int] = (), drafter: Drafter | None = None) -> Result:
        """Runs the next plan and returns its result.

        failing: sequences whose logits are not finite, if they sample. drafter: makes drafts for the rows for which the
        plan wants some.
        """
        self.step += 1
        self.renewed = set()
        assert plan.step == self.step, f"plan {plan.step} instead of {self.step}"
        for row in plan.freed_rows:
            assert self.rows.pop(row, None) is not None, f"row {row} was free already"
        self._swap(plan)
        for planned in plan.new_rows:
            self._add_row(planned)
        for row, num_kept in plan.trimmed_rows:
            self._trim(self.rows[row], num_kept)
        self._grow(plan)
        self._apply_items(plan)
        batch = self._batch(plan)
        self._check_items(batch)
        self._check_writers(plan, batch)
        drafts = self._add_drafts(plan, batch)
        self._write(batch)
        for row, count in batch:
            row.num_computed_tokens += count
            self._check_context(row)
        sampled = _Sampled()
        wanted = {self.rows[number].sequence: count for number, count in plan.wanted_drafts}
        assert all(count >= 1 for count in wanted.values())
        for row, _ in batch:
            if row.num_computed_tokens == len(row.token_ids):
                count = wanted.pop(row.sequence, 0)
                self._sample(row, drafts.get(row.sequence, ()), failing, drafter if count else None, count, sampled)
        assert not wanted, "drafts are wanted of a row that does not sample"
        return sampled.result(plan.step)

    # --- Items

    def receive(self, item: WantedItem) -> None:
        """Takes an item to prepare; `prepare` says when it is."""
        assert item.number not in self.inputs, f"item {item.number} is sent again, without being forgotten"
        assert self._name_of.setdefault(item.number, item.name) == item.name, "a number names two items"
        self.inputs[item.number] = item

    def prepare(self, number: int) -> None:
        self.prepared.add(number)

    def fail(self, number: int) -> None:
        del self.inputs[number]

    def _apply_items(self, plan: Plan) -> None:
        for number in plan.dropped_items:
            assert self.embeddings.pop(number, None), f"item {number} is dropped, and has no embeddings"
        for number in plan.forgotten_items:
            assert number in self.prepared, f"item {number} is forgotten, and is not prepared"
            self.prepared.remove(number)
            del self.inputs[number]
        for number in plan.encoded_items:
            assert number in self.prepared, f"item {number} is encoded before it is prepared"
            assert number not in self.embeddings, f"item {number} is encoded twice"
            self.embeddings[number] = self.inputs[number]
        size = sum(item.num_embeddings for item in self.embeddings.values())
        assert size <= self.encoder_cache_size, f"{size} embeddings in a cache of {self.encoder_cache_size}"

    def _check_items(self, batch: list[tuple[WorkerRow, int]]) -> None:
        for row, count in batch:
            start, end = row.num_computed_tokens, row.num_computed_tokens + count
            for number, span in row.items:
                if span.first_token < end and start < span.end:
                    assert number in self.embeddings, f"item {number} is computed without its embeddings"
                    assert self.embeddings[number].name == span.name, f"item {number} is another one"

    # --- Differences

    def _swap(self, plan: Plan) -> None:
        hosts = [host for _, host in plan.swapped_out]
        assert len(set(hosts)) == len(hosts), "two blocks are swapped to one host block"
        for block, host in plan.swapped_out:
            assert 0 <= host < self.num_swap_blocks
            self._check_block_ids([block])
            self._host[host] = self._kv[self._slots(block)]
        blocks = [block for _, block in plan.swapped_in]
        assert len(set(blocks)) == len(blocks), "two host blocks are swapped to one block"
        for host, block in plan.swapped_in:
            self._check_block_ids([block])
            # A host block is free once it is swapped in.
            self._kv[self._slots(block)] = self._host.pop(host)
            self.renewed.add(block)

    def _add_row(self, planned: PlannedRow) -> None:
        assert planned.row not in self.rows, f"row {planned.row} is taken"
        assert 0 <= planned.row < self.max_num_seqs
        assert planned.sequence not in self._seen, "a sequence number is used twice"
        assert 0 <= planned.num_computed_tokens < len(planned.token_ids)
        assert 1 <= planned.num_prompt_tokens <= len(planned.token_ids)
        self._check_block_ids(planned.block_ids)
        assert len(set(planned.block_ids)) == len(planned.block_ids), "a block is in a table twice"
        self._seen.add(planned.sequence)
        assert isinstance(planned.sampling, FakeSampling)
        row = WorkerRow(
            sequence=planned.sequence,
            choice=planned.choice,
            sampling=planned.sampling,
            num_prompt_tokens=planned.num_prompt_tokens,
            token_ids=[],
            block_ids=list(planned.block_ids),
            num_computed_tokens=planned.num_computed_tokens,
            digests=[planned.sampling.scope],
            items=planned.items,
        )
        spans = tuple(span for _, span in planned.items)
        row.extend(planned.token_ids, with_embeddings(tuple(planned.token_ids), spans))
        self.rows[planned.row] = row

    def _trim(self, row: WorkerRow, num_kept: int) -> None:
        assert num_kept < len(row.block_ids), "nothing is trimmed"
        assert num_kept * self.block_size >= row.num_computed_tokens, "a block that holds computed tokens is trimmed"
        del row.block_ids[num_kept:]

    def _grow(self, plan: Plan) -> None:
        assert len(set(plan.grown_rows)) == len(plan.grown_rows), "a row grows twice"
        assert len(plan.grown_rows) == len(plan.num_new_blocks)
        assert sum(plan.num_new_blocks) == len(plan.new_blocks)
        start = 0
        for number, count in zip(plan.grown_rows, plan.num_new_blocks, strict=True):
            assert count >= 1
            blocks = plan.new_blocks[start : start + count]
            self._check_block_ids(blocks)
            table = self.rows[number].block_ids
            assert not set(blocks) & set(table), "a block is in a table twice"
            table += blocks
            start += count

    def _check_block_ids(self, block_ids: list[int]) -> None:
        assert all(1 <= block <= self.num_blocks for block in block_ids)

    # --- The batch

    def _batch(self, plan: Plan) -> list[tuple[WorkerRow, int]]:
        assert plan.decode_rows.dtype == np.uint16
        assert plan.rows_with_drafts.dtype == np.uint16
        assert plan.num_drafts.dtype == plan.draft_token_ids.dtype == np.int32
        assert plan.num_drafts.sum() == len(plan.draft_token_ids), "drafts of no row, or too few"
        numbers = [row for row, _ in plan.batch]
        assert len(set(numbers)) == len(numbers), "a row is scheduled twice"
        assert {planned.row for planned in plan.new_rows} <= set(numbers), "a new row idles"
        assert plan.num_tokens <= self.max_num_batched_tokens, "over the token budget"
        assert all(count >= 1 for _, count in plan.chunks)
        for number in [*plan.decode_rows.tolist(), *plan.rows_with_drafts.tolist()]:
            lacking = self.rows[number].num_lacking
            assert lacking == 1, f"row {number} decodes, but lacks {lacking} tokens"
        return [(self.rows[number], count) for number, count in plan.batch]

    def _add_drafts(self, plan: Plan, batch: list[tuple[WorkerRow, int]]) -> dict[int, tuple[int, ...]]:
        """Appends drafts to the tokens of their rows, until they are verified. Returns the drafts by sequence."""
        counts = {row.sequence: count for row, count in batch}
        assert len({number for number, _ in plan.drafts}) == len(plan.drafts)
        drafts = {}
        for number, token_ids in plan.drafts:
            row = self.rows[number]
            assert token_ids, "a row has an empty list of drafts"
            assert counts[row.sequence] == row.num_lacking + len(token_ids), "drafts without a sample"
            row.extend(token_ids)
            drafts[row.sequence] = token_ids
        for row, count in batch:
            end = row.num_computed_tokens + count
            assert end <= len(row.token_ids), "more tokens than there are"
            assert end <= len(row.block_ids) * self.block_size, "too few blocks"
        return drafts

    def _slots(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _check_writers(self, plan: Plan, batch: list[tuple[WorkerRow, int]]) -> None:
        """Asserts that a written block is in no other table, except of new rows that read what this step writes."""
        tables: dict[int, list[tuple[WorkerRow, int]]] = defaultdict(list)
        for row in self.rows.values():
            for index, block in enumerate(row.block_ids):
                tables[block].append((row, index))
        new_sequences = {planned.sequence for planned in plan.new_rows}
        for row, count in batch:
            first = row.num_computed_tokens // self.block_size
            last = (row.num_computed_tokens + count - 1) // self.block_size
            for index in range(first, min(last + 1, len(row.block_ids))):
                for other, other_index in tables[row.block_ids[index]]:
                    if other is not row:
                        assert other_index == index, "a block stands at two places"
                        assert other.sequence in new_sequences, "a row writes a block that another one has"
                        assert (index + 1) * self.block_size <= other.num_computed_tokens, "two rows write one block"

    def _write(self, batch: list[tuple[WorkerRow, int]]) -> None:
        """Writes every row's KV before any row reads, as each layer of a model does."""
        kv, block_size = self._kv, self.block_size
        for row, count in batch:
            position, end = row.num_computed_tokens, row.num_computed_tokens + count
            while position < end:
                block, offset = row.block_ids[position // block_size], position % block_size
                stop = min(end, position - offset + block_size)
                slot = block * block_size + offset
                kv[slot : slot + stop - position] = row.digests[position + 1 : stop + 1]
                if not offset:
                    self.renewed.add(block)
                position = stop

    def _check_context(self, row: WorkerRow) -> None:
        kv, digests, block_size, length = self._kv, row.digests, self.block_size, row.num_computed_tokens
        for index in range(-(-length // block_size)):
            start, block = index * block_size, row.block_ids[index]
            count = min(block_size, length - start)
            slot = block * block_size
            assert kv[slot : slot + count] == digests[start + 1 : start + count + 1], (
                f"sequence {row.sequence} reads KV of another prefix in block {block}, at positions from {start}"
            )

    # --- Results

    def _sample(
        self,
        row: WorkerRow,
        drafts: tuple[int, ...],
        failing: Collection[int],
        drafter: Drafter | None,
        num_wanted: int,
        sampled: _Sampled,
    ) -> None:
        num_known = len(row.token_ids) - len(drafts)
        row.truncate(num_known)
        token_ids = self._next_tokens(row, len(drafts) + 1)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == token_ids[accepted]:
            accepted += 1
        if row.has_failed or row.sequence in failing:
            if accepted and not row.has_failed:
                # It has failed after its first draft.
                sampled.sequences.append(row.sequence)
                sampled.positions.append(row.num_outputs)
                sampled.counts.append(1)
                sampled.token_ids.append(token_ids[0])
                if row.sampling.has_logprobs:
                    sampled.logprobs[row.sequence] = [logprobs_of(token_ids[0])]
            # It continues with an arbitrary token: a step planned before the scheduler knows may schedule it again.
            row.has_failed = True
            row.extend([0])
            sampled.failed.add(row.sequence)
            return
        token_ids = token_ids[: accepted + 1]
        row.has_sampled = True
        sampled.sequences.append(row.sequence)
        sampled.positions.append(row.num_outputs)
        sampled.counts.append(len(token_ids))
        sampled.token_ids += token_ids
        row.extend(token_ids)
        row.num_computed_tokens = num_known + accepted
        if row.sampling.has_logprobs:
            sampled.logprobs[row.sequence] = [logprobs_of(token_id) for token_id in token_ids]
        if row.sampling.is_constrained and (count := num_forced(row.digests[-1])):
            sampled.drafts[row.sequence] = tuple(self._next_tokens(row, count))
        elif drafter is not None and (guesses := drafter(self._next_tokens(row, 8))):
            sampled.drafts[row.sequence] = guesses[:num_wanted]

    @staticmethod
    def _next_tokens(row: WorkerRow, count: int) -> list[int]:
        """The tokens that would be sampled next if each were accepted."""
        token_ids, digest = [], row.digests[-1]
        for _ in range(count):
            token_ids.append(next_token(digest, row.sampling, row.choice))
            digest = extend_digest(digest, token_ids[-1])
        return token_ids
