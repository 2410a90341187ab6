"""Masks and forced tokens of the rows with a constraint in a step."""

from collections.abc import Iterator, Sequence

import numpy as np

from kernels.sampling import TokenMasks
from runtime.wire import MAX_FORCED_TOKENS
from worker.sampling.adjustments.constraint import ConstrainedRow, Job
from worker.step.rows import Rows


def begin_masks(rows: Rows, rows_N: np.ndarray, num_drafts_N: np.ndarray | None) -> None:
    """Starts to compute the masks that a step's sampling rows need, and those of its new rows, which may sample in a
    later step. Call it between `Rows.schedule` and `Rows.settle_drafts`."""
    constrained, sampling = rows.sampling.constrained, rows_N.tolist()
    if not constrained:
        return
    new = {each.row for each in rows.changes.new_rows}.difference(sampling)
    jobs = [(constrained[row], constrained[row].masking(most=MAX_FORCED_TOKENS)) for row in constrained if row in new]
    for index, row in enumerate(sampling):
        if row not in constrained:
            continue
        drafts: Sequence[int] = ()
        if num_drafts_N is not None and (count := int(num_drafts_N[index])):
            end = int(rows.num_tokens_R[row])
            drafts = rows.token_ids_RL[row, end - count : end].tolist()
        jobs.append((constrained[row], constrained[row].masking(drafts, most=MAX_FORCED_TOKENS)))
    _start(rows, jobs)


def step_masks(rows: Rows, rows_N: np.ndarray, num_drafts_N: np.ndarray | None) -> TokenMasks:
    """Waits for the masks that `begin_masks` started, and returns those of the L positions that a step scores: for each
    row, the one after its last token before the drafts, then those after each draft."""
    constrained, masks = rows.sampling.constrained, list[np.ndarray | None]()
    for index, row in enumerate(rows_N.tolist()):
        each = constrained.get(row)
        count = 1 if num_drafts_N is None else 1 + int(num_drafts_N[index])
        masks += [None] * count if each is None else each.masks(count)
    return masks


def find_forced(rows: Rows, rows_N: Sequence[int], *, looks: bool = True) -> Iterator[tuple[int, list[int]]]:
    """Yields rows after whose tokens, all appended, others must follow, with these. Also starts to compute the masks of
    the next step, which tries them. Not `looks`: waits for nothing, and yields those that were found with the masks of
    the step before."""
    constrained = rows.sampling.constrained
    found = [(row, constrained[row]) for row in rows_N if row in constrained]
    if not found:
        return
    if looks:
        _start(rows, [(each, each.forcing(MAX_FORCED_TOKENS)) for _, each in found])
    forced = [each.forced for _, each in found]
    _start(
        rows,
        [(each, each.masking(tokens, most=MAX_FORCED_TOKENS)) for (_, each), tokens in zip(found, forced, strict=True)],
    )
    yield from ((row, tokens) for (row, _), tokens in zip(found, forced, strict=True) if tokens)


def _start(rows: Rows, jobs: list[tuple[ConstrainedRow, Job | None]]) -> None:
    wanted: list[tuple[ConstrainedRow, Job]] = []
    for row, job in jobs:
        if job is not None and row.is_light:
            job()
        elif job is not None:
            wanted.append((row, job))
    grammars = rows.sampling.grammars
    if grammars is None:
        return
    for (row, _), future in zip(wanted, grammars.start([job for _, job in wanted]), strict=True):
        row.attach(future)
