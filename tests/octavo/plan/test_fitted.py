"""Costs from measured steps: the record of steps, the fit of known coefficients, and the overhead of a cluster."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.lab.errors import PlanError
from octavo.plan.costs.fitted import Fitted, fit
from octavo.plan.costs.samples import ServeResult, StepRecorder, StepSample, read_measurements
from octavo.plan.costs.step_shape import PaperRows, StepShape
from octavo.plan.simulate import simulate
from octavo.plan.targets import calibrate
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, GroupRequest, Plan, StopRules
from tests.support.scheduler.plan import settings, workload

# Milliseconds for each step, decode, prefill token, prompt, sampled row, context token of a decode, context token of a
# prompt, and attention pair.
KNOWN = np.array([4.0, 0.2, 0.3, 0.05, 0.1, 1e-3, 2e-3, 1e-5]) * 1e-3


def shape(decodes: int, prefill: int, chunks: int, context: int) -> StepShape:
    return StepShape(
        num_decodes=decodes,
        num_prefill_tokens=prefill,
        num_chunks=chunks,
        num_sampled=decodes + chunks // 2,
        decode_context=decodes * context,
        chunk_context=prefill + chunks * context,
        attention_pairs=prefill * (prefill + 1) // 2,
    )


def known_cost() -> Fitted:
    return Fitted(coefficients=tuple(KNOWN.tolist()), median_error=0.0, num_samples=0)


def known_samples(noise: float = 0.0) -> list[StepSample]:
    random = np.random.default_rng(0)
    shapes = [shape(d, 0, 0, c) for d in (1, 4, 8, 32, 64) for c in (50, 200, 600)]
    chunks = ((16, 1), (100, 2), (500, 5), (2000, 16))
    shapes += [shape(d, p, n, c) for d, c in ((0, 100), (8, 700), (40, 30)) for p, n in chunks]
    cost = known_cost()
    return [StepSample(1, s, sum(cost.stage_seconds(s)) * random.lognormal(0, noise)) for s in shapes]


def test_a_fit_finds_the_coefficients_that_made_the_samples() -> None:
    fitted = fit(known_samples())
    assert fitted.coefficients == pytest.approx(KNOWN, rel=1e-4)
    assert fitted.median_error < 1e-6


def test_a_fit_bears_noise_and_single_slow_steps() -> None:
    samples = known_samples(noise=0.05)
    for slow in (3, 17):
        samples[slow] = StepSample(1, samples[slow].shape, samples[slow].seconds * 5)
    fitted = fit(samples)
    for decodes, prefill, chunks in ((16, 0, 0), (8, 300, 3)):
        step = shape(decodes, prefill, chunks, 120)
        assert sum(fitted.stage_seconds(step)) == pytest.approx(sum(known_cost().stage_seconds(step)), rel=0.08)


def test_nothing_costs_less_than_nothing() -> None:
    # Steps get cheaper with more context: the best line falls, but no coefficient may be negative.
    samples = [StepSample(1, shape(4, 0, 0, c), 1.0 - c / 2000) for c in (10, 100, 500, 1000)]
    assert min(fit(samples).coefficients) >= 0.0


def test_sums_over_steps_fit_like_the_steps_themselves() -> None:
    one = known_samples()
    sums = [StepSample(3, StepShape(*(3 * n for n in _numbers(s.shape))), 3 * s.seconds) for s in one]
    assert fit(sums).coefficients == pytest.approx(fit(one).coefficients, rel=1e-3)


def _numbers(step: StepShape) -> list[int]:
    return [getattr(step, name) for name in StepShape.__dataclass_fields__]


def plans() -> list[Plan]:
    """Plans of a core with prompts above the token budget and decodes beside them."""
    core, rows, made = Core(settings(max_num_batched_tokens=16)), PaperRows(16), []
    for group, prompt_len in enumerate((6, 40, 20)):
        core.submit(
            GroupRequest(
                group=group,
                request_id=str(group),
                prompt_token_ids=tuple(range(100 * group, 100 * group + prompt_len)),
                choices=(ChoiceStart(choice=0),),
                stop=StopRules(max_tokens=5, ignore_eos=True),
            ),
            0.0,
        )
    while (plan := core.schedule(0.0)) is not None:
        made.append(plan)
        core.apply(rows.apply(plan)[1], 0.0)
    return made


def test_the_shape_of_a_step_says_what_it_computes() -> None:
    rows = PaperRows(16)
    first, second = (rows.apply(plan)[0] for plan in plans()[:2])
    # A whole prompt of 6 tokens, and 10 tokens of 40.
    assert (first.num_decodes, first.num_prefill_tokens, first.num_chunks, first.num_sampled) == (0, 16, 2, 1)
    assert (first.chunk_context, first.attention_pairs) == (16, 21 + 55)
    # A decode over 7 tokens, and 15 more of the 40 tokens, after the 10 before them.
    assert (second.num_decodes, second.decode_context, second.num_prefill_tokens) == (1, 7, 15)
    assert (second.chunk_context, second.attention_pairs, second.num_sampled) == (25, 15 * 10 + 120, 1)


def test_a_plan_counts_the_tokens_that_its_step_reads() -> None:
    rows, made = PaperRows(16), plans()
    shapes = [rows.apply(plan)[0] for plan in made]
    assert [plan.num_context_tokens for plan in made] == [
        shape.decode_context + shape.chunk_context for shape in shapes
    ]


def bench_line(recorder: StepRecorder, **changes: object) -> str:
    engine = {"block_size": 16, "num_blocks": 100, "max_model_len": 512, "kv_cache_memory": 1.0}
    line = {"model": "m", "engine_settings": engine, "steps": recorder.as_json(), **changes}
    return json.dumps(line) + "\n"


def recorded() -> StepRecorder:
    recorder = StepRecorder(16)
    for plan in plans():
        recorder.add(plan, 0.5)
    return recorder


def test_what_is_recorded_is_read_again_and_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    serve = {
        "model": "its-served-name",
        "request_rate": "inf",
        "num_requests": 4,
        "num_errors": 0,
        "concurrency": 2,
        "prompt_len": 8,
        "output_len": 4,
        "duration_s": 3.0,
    }
    failed = serve | {"num_errors": 1}
    path.write_text(bench_line(recorded()) + json.dumps(serve) + "\n" + json.dumps(failed) + "\n")
    found = read_measurements([path])
    assert sum(sample.num_steps for sample in found.samples) == len(plans())
    assert sum(sample.seconds for sample in found.samples) == pytest.approx(0.5 * len(plans()))
    assert sum(sample.shape.num_prefill_tokens for sample in found.samples) == 6 + 40 + 20
    assert sum(sample.shape.num_sampled for sample in found.samples) == 3 * 5
    assert (found.model, found.engine.num_blocks) == ("m", 100)
    assert [result.request_rate for result in found.serve] == [float("inf")]


def test_long_runs_are_summed_up() -> None:
    recorder, plan = StepRecorder(16), plans()[0]
    for _ in range(1000):
        recorder.add(plan, 0.001)
    rows = recorder.as_json()["rows"]
    assert isinstance(rows, list)
    assert len(rows) <= 64
    assert sum(row[0] for row in rows) == 1000
    assert sum(row[-1] for row in rows) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no measured step"),
        ("{}\n", "holds no measured step"),
        ("[]\n", "line 1 is not a result of octavo bench"),
        ("not json\n", "line 1 is not a result of octavo bench"),
        ('{"model": "m", "output_tok_s": 5.0}\n', "holds no measured step; `octavo bench throughput --json`"),
        (bench_line(recorded()) + bench_line(recorded(), model="other"), "results of several models"),
        (bench_line(recorded(), steps={"columns": ["a"], "rows": []}), "its steps have the columns"),
    ],
)
def test_files_that_say_nothing_of_use_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_measurements([path])


def test_a_missing_file_is_said_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no such file; `octavo bench throughput .* --json > .*none"):
        read_measurements([tmp_path / "none"])


def test_a_calibration_finds_what_a_cluster_adds() -> None:
    engine, core = known_cost(), settings(num_blocks=2000)
    cluster = replace(engine, step_seconds=0.002, token_seconds=0.0005)
    results = []
    for concurrency in (2, 8, 16):
        requests = workload(*[(0.0, 40, 20)] * 32, concurrency=concurrency)
        run = simulate(core, cluster, requests, num_replicas=2)
        results.append(
            ServeResult(
                num_requests=32,
                concurrency=concurrency,
                request_rate=float("inf"),
                prompt_len=40,
                output_len=20,
                duration=run.duration,
            )
        )
    found = calibrate(engine, results, core, num_replicas=2)
    # This concurrency was not among the measured ones.
    requests = workload(*[(0.0, 40, 20)] * 32, concurrency=12)
    predicted, true = (simulate(core, cost, requests, num_replicas=2).duration for cost in (found, cluster))
    assert predicted == pytest.approx(true, rel=0.05)
    assert simulate(core, engine, requests, num_replicas=2).duration < 0.9 * true
