"""Steps that a new worker computes before its first request."""

from protos import inference_pb2, step_pb2
from runtime.media.recipes.recipe import Layout
from worker.step.rows import Rows

# 256 tokens take ten times as long on a CPU, and do not make the first request faster.
_TOKENS = 16


def warm_up_plans(rows: Rows, item: Layout | None = None) -> list[step_pb2.StepPlan]:
    """Returns a prefill and a decode; and the same with an item, whose number is 0 and which is encoded already. All
    rows must be free; call `reset` after them."""
    length = min(_TOKENS, rows.max_num_batched_tokens, rows.max_model_len - 1)
    plans = _plans(rows, [0] * length, step=1)
    if item is None or len(item.token_ids) > min(rows.max_num_batched_tokens, rows.max_model_len - 1):
        return plans
    if 1 + len(item.token_ids) // rows.block_size > rows.num_blocks:
        return plans
    row_item = step_pb2.RowItem(
        number=0, first_token=0, num_tokens=len(item.token_ids), grid=item.grid, time_step=item.time_step
    )
    return plans + _plans(rows, [*item.token_ids], step=3, freed_rows=[0], items=[row_item])


def _plans(
    rows: Rows,
    token_ids: list[int],
    *,
    step: int,
    freed_rows: list[int] | None = None,
    items: list[step_pb2.RowItem] | None = None,
) -> list[step_pb2.StepPlan]:
    new = step_pb2.NewRow(
        sequence=step,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        block_ids=range(1, 2 + len(token_ids) // rows.block_size),
        sampling=inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=0),
        items=items,
    )
    prefill = step_pb2.StepPlan(step=step, freed_rows=freed_rows, new_rows=[new], rows=[0], num_tokens=[len(token_ids)])
    return [prefill, step_pb2.StepPlan(step=step + 1, decode_rows=bytes(2))]
