"""Kernels that make a step's batch on the GPU: they run no longer than it takes to launch them."""

import torch

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of
from benchmarks.gpu.report import Report
from kernels.step_inputs import reference
from kernels.step_inputs.triton import expand, remember_tokens, write_tables

_BLOCK_SIZE = 16


def run(report: Report, *, toy: bool) -> None:
    # Rows, and tokens of each row.
    for num_rows, num_queries in ((3, 2),) if toy else ((256, 1), (8, 1024)):
        _step(report, num_rows, num_queries, max_blocks=64 if toy else 2048)


def _step(report: Report, num_rows: int, num_queries: int, max_blocks: int) -> None:
    def ints(*shape: int, high: int = 1000) -> torch.Tensor:
        return torch.randint(high, shape, dtype=torch.int32, device=report.device)

    case = f"{num_rows} rows x {num_queries} tokens"
    num_tokens = num_rows * num_queries
    rows = torch.randperm(num_rows, device=report.device).int()
    starts = torch.arange(num_rows + 1, device=report.device).int() * num_queries
    contexts = num_queries + ints(num_rows, high=_BLOCK_SIZE * max_blocks - num_queries)
    tables = ints(num_rows, max_blocks)
    last_tokens, host_tokens = ints(num_rows), ints(num_tokens) - 1
    token_ids, positions, slots = ints(num_tokens), ints(num_tokens), ints(num_tokens).long()
    inputs = rows, starts, contexts, host_tokens, last_tokens, tables

    def expand_all() -> None:
        expand(*inputs, block_size=_BLOCK_SIZE, token_ids_T=token_ids, positions_T=positions, slots_T=slots)

    expand_all()
    expected = reference.expand(*(tensor.cpu() for tensor in inputs), block_size=_BLOCK_SIZE)
    for got, wanted in zip((token_ids, positions, slots), expected, strict=True):
        report.check("step_inputs", case, got, torch.tensor(wanted, dtype=got.dtype), rtol=0, atol=0)
    num_bytes = num_bytes_of(*inputs[:4], token_ids, positions, slots) + 4 * num_tokens
    measure(report, "step_inputs", case, "expand", num_bytes, expand_all)
    # Each row begins a block.
    places = contexts // _BLOCK_SIZE
    num_bytes = 4 * num_bytes_of(rows)
    measure(report, "step_inputs", case, "write_tables", num_bytes, lambda: write_tables(tables, rows, places, rows))
    num_bytes = 3 * num_bytes_of(rows)
    measure(report, "step_inputs", case, "remember", num_bytes, lambda: remember_tokens(last_tokens, rows, contexts))
