"""Steps that a new worker computes before its first request."""

from protos import inference_pb2, step_pb2
from runtime.media.recipes.recipe import Layout
from worker.step.rows import Rows

# 256 tokens take ten times as long on a CPU, and do not make the first request faster.
_TOKENS = 16


def warm_up_plans(rows: Rows, item: Layout | None = None, *, all_kinds: bool = False) -> list[step_pb2.StepPlan]:
    """Returns a prefill and a decode that draw with a filter; and the same with an item, whose number is 0 and which is
    encoded already. All rows must be free; call `reset` after them. all_kinds: also a step of one token that chooses
    the likeliest, and one that draws from all, for devices that compile kernels for each kind of sampling."""
    length = min(_TOKENS, rows.max_num_batched_tokens, rows.max_model_len - 1)
    plans = _plans(rows, [0] * length, step=1)
    if all_kinds:
        for temperature in (0.0, 1.0):
            sampling = inference_pb2.SamplingParams(temperature=temperature, seed=0)
            plans += _plans(rows, [0], step=len(plans) + 1, freed_rows=[0], sampling=sampling)[:1]
    if item is None or len(item.token_ids) > min(rows.max_num_batched_tokens, rows.max_model_len - 1):
        return plans
    if 1 + len(item.token_ids) // rows.block_size > rows.num_blocks:
        return plans
    row_item = step_pb2.RowItem(
        number=0, first_token=0, num_tokens=len(item.token_ids), grid=item.grid, time_step=item.time_step
    )
    return plans + _plans(rows, [*item.token_ids], step=len(plans) + 1, freed_rows=[0], items=[row_item])


def _plans(
    rows: Rows,
    token_ids: list[int],
    *,
    step: int,
    freed_rows: list[int] | None = None,
    items: list[step_pb2.RowItem] | None = None,
    sampling: inference_pb2.SamplingParams | None = None,
) -> list[step_pb2.StepPlan]:
    new = step_pb2.NewRow(
        sequence=step,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        block_ids=range(1, 2 + len(token_ids) // rows.block_size),
        sampling=sampling or inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=0),
        items=items,
    )
    prefill = step_pb2.StepPlan(step=step, freed_rows=freed_rows, new_rows=[new], rows=[0], num_tokens=[len(token_ids)])
    return [prefill, step_pb2.StepPlan(step=step + 1, decode_rows=bytes(2))]
