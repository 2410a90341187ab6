"""A model and a worker without weights, for tests of scheduling.

The next token is a function of the tokens before it, and the KV cache remembers which prefix each slot was written for.
So whatever scheduling does wrong to blocks, rows or positions is seen at once.
"""

from dataclasses import dataclass, field

from scheduler.messages import FinishReason, Plan, PlannedRow, Result, Sampled, StopRules

VOCAB_SIZE = 13


def extend_digest(digest: int, token_id: int) -> int:
    """The digest of a prefix, from that of the prefix one token shorter. The digest of no tokens is the scope."""
    return hash((digest, token_id))


def next_token(digest: int, choice: int) -> int:
    """What the model says after a prefix: choices differ, as sampled ones do."""
    return hash((choice, digest)) % VOCAB_SIZE


def generate(
    prompt: tuple[int, ...], output: tuple[int, ...], choice: int, stop: StopRules, eos: frozenset[int], scope: int = 0
) -> tuple[list[int], FinishReason]:
    """The whole output of a sequence that begins with `output`, computed without any scheduling."""
    digest, tokens = scope, list(output)
    for token_id in prompt + output:
        digest = extend_digest(digest, token_id)
    while True:
        may_stop = tokens and len(tokens) >= stop.min_tokens
        if may_stop and (tokens[-1] in stop.stop_token_ids or (tokens[-1] in eos and not stop.ignore_eos)):
            return tokens, FinishReason.STOP
        if len(tokens) >= stop.max_tokens:
            return tokens, FinishReason.LENGTH
        tokens.append(next_token(digest, choice))
        digest = extend_digest(digest, tokens[-1])


@dataclass(slots=True)
class _Row:
    planned: PlannedRow
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    # Entry i is the digest of the first i tokens.
    digests: list[int] = field(default_factory=list)

    def extend(self) -> None:
        while len(self.digests) <= len(self.token_ids):
            self.digests.append(extend_digest(self.digests[-1], self.token_ids[len(self.digests) - 1]))


class FakeWorker:
    """Applies plans as a worker does, remembering rows, and asserts every promise of step.proto on the way.

    `PlannedRow.sampling` is the scope: an int that stands for the cache salt. KV of another scope is another KV.
    """

    def __init__(self, *, block_size: int, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: dict[int, _Row] = {}
        self.kv: dict[int, int] = {}  # slot -> digest of the prefix that ends there
        self._seen: set[int] = set()

    def run(self, plan: Plan) -> Result:
        for row in plan.freed_rows:
            assert self.rows.pop(row, None) is not None, f"row {row} was free already"
        for planned in plan.new_rows:
            self._add_row(planned)
        for row, block_ids in plan.grown_rows:
            assert block_ids
            self._check_block_ids(block_ids)
            self.rows[row].block_ids += block_ids
        assert plan.scheduled, "an empty step"
        assert plan.num_tokens <= self.max_num_batched_tokens
        assert len({row for row, _ in plan.scheduled}) == len(plan.scheduled), "a row is scheduled twice"
        assert {planned.row for planned in plan.new_rows} <= {row for row, _ in plan.scheduled}, "a new row idles"
        starts = {row: state.num_computed_tokens for row, state in self.rows.items()}
        self._write(plan, starts)
        self._check_contexts(plan)
        return Result(sampled=[sampled for row, _ in plan.scheduled if (sampled := self._sample(self.rows[row]))])

    def _add_row(self, planned: PlannedRow) -> None:
        assert planned.row not in self.rows, f"row {planned.row} is taken"
        assert 0 <= planned.row < self.max_num_seqs
        assert planned.sequence not in self._seen, "a sequence number is used twice"
        assert 0 <= planned.num_computed_tokens < len(planned.token_ids)
        assert 1 <= planned.num_prompt_tokens <= len(planned.token_ids)
        self._check_block_ids(planned.block_ids)
        self._seen.add(planned.sequence)
        assert isinstance(planned.sampling, int)
        row = _Row(planned, list(planned.token_ids), list(planned.block_ids), planned.num_computed_tokens)
        row.digests.append(planned.sampling)
        row.extend()
        self.rows[planned.row] = row

    def _check_block_ids(self, block_ids: list[int]) -> None:
        assert all(1 <= block <= self.num_blocks for block in block_ids)

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, plan: Plan, starts: dict[int, int]) -> None:
        """Every row's KV, before any row reads, as each layer of a model does it."""
        written: set[int] = set()
        new_rows = {planned.row for planned in plan.new_rows}
        for number, count in plan.scheduled:
            row = self.rows[number]
            end = row.num_computed_tokens + count
            assert count >= 1
            assert end <= len(row.token_ids), "more tokens than there are"
            assert end <= len(row.block_ids) * self.block_size, "too few blocks"
            for position in range(row.num_computed_tokens, end):
                slot, block = self._slot(row, position), row.block_ids[position // self.block_size]
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                for other_number, other in self.rows.items():
                    if other is not row and block in other.block_ids:
                        assert other_number in new_rows, "a row writes a block that another one has read"
                        assert position < starts[other_number], "two rows write one block"
                self.kv[slot] = row.digests[position + 1]
            row.num_computed_tokens = end

    def _check_contexts(self, plan: Plan) -> None:
        for number, _ in plan.scheduled:
            row = self.rows[number]
            for position in range(row.num_computed_tokens):
                assert self.kv.get(self._slot(row, position)) == row.digests[position + 1], (
                    f"row {number} reads KV of another prefix at position {position}"
                )

    def _sample(self, row: _Row) -> Sampled | None:
        if row.num_computed_tokens < len(row.token_ids):
            return None
        position = len(row.token_ids) - row.planned.num_prompt_tokens
        token_id = next_token(row.digests[-1], row.planned.choice)
        row.token_ids.append(token_id)
        row.extend()
        return Sampled(sequence=row.planned.sequence, position=position, token_id=token_id)
