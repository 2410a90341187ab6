"""Steps that a new worker computes before its first request."""

from protos import inference_pb2, step_pb2
from worker.step.rows import Rows

# 256 tokens take ten times as long on a CPU, and do not make the first request faster.
_TOKENS = 16


def warm_up_plans(rows: Rows) -> list[step_pb2.StepPlan]:
    """Returns a prefill and a decode. All rows must be free; call `reset` after them."""
    length = min(_TOKENS, rows.max_num_batched_tokens, rows.max_model_len - 1)
    new = step_pb2.NewRow(
        sequence=1,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        block_ids=range(1, 2 + length // rows.block_size),
        sampling=inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=0),
    )
    return [
        step_pb2.StepPlan(step=1, new_rows=[new], rows=[0], num_tokens=[length]),
        step_pb2.StepPlan(step=2, decode_rows=bytes(2)),
    ]
