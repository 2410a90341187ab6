"""Microseconds that the scheduling core takes for one step of nothing but decodes.

    python -m benchmarks.core_step [--json]

A step is one `schedule` and one `apply`; the result is made outside the measured time. Sequences start from prompts of
128 tokens and run for 512 steps, so that each fills and publishes a block of 16 every 16 steps.
"""

import argparse
import json
import statistics
import time

from scheduler.core import Core
from scheduler.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, Result, Sampled, StopRules

PROMPT_LEN, NUM_STEPS, BLOCK_SIZE = 128, 512, 16


def _result(plan: Plan, sequences: dict[int, int], position: int) -> Result:
    """What workers would say: every scheduled row samples."""
    sampled = [Sampled(sequence=sequences[row], position=position, token_id=7) for row, _ in plan.scheduled]
    return Result(sampled=sampled)


def measure(num_seqs: int) -> dict[str, object]:
    """Percentiles over the decode steps of so many sequences."""
    max_model_len = PROMPT_LEN + NUM_STEPS + 1
    core = Core(
        CoreSettings(
            block_size=BLOCK_SIZE,
            num_blocks=num_seqs * (max_model_len // BLOCK_SIZE + 1),
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * PROMPT_LEN,
            eos_token_ids=frozenset({2}),
        )
    )
    for group in range(num_seqs):
        # Offset lengths spread the full blocks over the steps, as in real use.
        prompt = tuple((group * 31 + i) % 30_000 + 10 for i in range(PROMPT_LEN - group % BLOCK_SIZE))
        core.submit(
            GroupRequest(
                group=group,
                request_id=str(group),
                prompt_token_ids=prompt,
                choices=(ChoiceStart(choice=0),),
                stop=StopRules(max_tokens=NUM_STEPS + 1),
            ),
            0.0,
        )
    plan = core.schedule(0.0)
    assert plan is not None
    sequences = {row.row: row.sequence for row in plan.new_rows}
    core.apply(plan, _result(plan, sequences, 0), 0.0)
    schedule_us: list[float] = []
    step_us: list[float] = []
    for position in range(1, NUM_STEPS):
        begin = time.perf_counter()
        plan = core.schedule(0.0)
        scheduled = time.perf_counter()
        assert plan is not None
        result = _result(plan, sequences, position)
        resumed = time.perf_counter()
        outputs = core.apply(plan, result, 0.0)
        end = time.perf_counter()
        assert len(outputs) == num_seqs
        schedule_us.append((scheduled - begin) * 1e6)
        step_us.append((scheduled - begin + end - resumed) * 1e6)
    return {
        "benchmark": "core_step",
        "num_seqs": num_seqs,
        "step_us_p50": round(statistics.median(step_us), 1),
        "step_us_p99": round(statistics.quantiles(step_us, n=100)[98], 1),
        "schedule_us_p50": round(statistics.median(schedule_us), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    as_json = parser.parse_args().json
    for num_seqs in (64, 256):
        figures = measure(num_seqs)
        if as_json:
            print(json.dumps(figures))
        else:
            print(
                f"{num_seqs:4d} sequences: {figures['step_us_p50']} us a step (p99 {figures['step_us_p99']}), "
                f"of it schedule {figures['schedule_us_p50']}"
            )


if __name__ == "__main__":
    main()
