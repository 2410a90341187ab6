"""The tuner on clusters of a virtual clock, against the whole grid measured exhaustively."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_options
from configs.options import Options
from octavo.doctor.machine import Machine
from octavo.doctor.subjects import memory as memory_subject
from octavo.doctor.subjects.memory import HostMemory
from octavo.lab.bounds import Bounds, lasting
from octavo.lab.errors import TuningError
from octavo.lab.flags import DatasetKind, LoadFlags
from octavo.lab.journal import Journal
from octavo.lab.settings import GivenOptions, Setting, grid
from octavo.tune.progress import Progress
from octavo.tune.query import workload_of as workload_to_tune
from octavo.tune.rates import highest_rate
from octavo.tune.search.results import Found, Status
from octavo.tune.search.tuner import Effort, Tuner
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.trials.memory import MemoryRange, highest_that_works, memory_values
from octavo.tune.workload import TuneWorkload
from tests.support.models.tiny_model import make_tiny_model
from tests.support.scheduler.plan import LinearCost
from tests.support.scheduler.simulated_clusters import SimulatedClusters, cost_of, workload_of

AXES = {"max_num_seqs": (2, 8, 64), "max_num_batched_tokens": (32, 64, 256)}
LOADS: dict[str, dict[str, Any]] = {
    "short prompts": {"prompt_len": "uniform:8:60", "output_len": "uniform:10:24"},
    "long prompts": {"prompt_len": "uniform:100:200", "output_len": "uniform:5:12"},
    "a shared prefix": {
        "dataset": DatasetKind.PREFIXES,
        "prefix_len": 160,
        "num_prefixes": 2,
        "prompt_len": "200",
        "output_len": "12",
    },
}
BOUNDS = Bounds(itl_ms=60.0, ttft_ms=3000.0)


def tune(
    directory: Path,
    clusters: SimulatedClusters,
    workload: TuneWorkload,
    *,
    bounds: Bounds = BOUNDS,
    effort: Effort | None = None,
    memory: MemoryRange | None = None,
    axes: Mapping[str, tuple[Any, ...]] = AXES,
) -> Found:
    journal = Journal(
        directory / "state.jsonl", {"axes": {name: [*values] for name, values in axes.items()}}, advice="begin anew"
    )
    tuner = Tuner(
        grid(axes),
        workload,
        bounds,
        effort or Effort(),
        clusters=clusters,
        journal=journal,
        traces=directory / "traces",
        watcher=Progress(hidden=True),
    )
    try:
        return tuner.run(memory)
    finally:
        journal.close()


@pytest.mark.parametrize("name", LOADS)
def test_the_winner_is_as_good_as_that_of_the_whole_grid(tmp_path: Path, name: str) -> None:
    workload = workload_of(**LOADS[name])
    clusters, everything = SimulatedClusters(cost_of), SimulatedClusters(cost_of)
    found = tune(tmp_path / "tuned", clusters, workload)
    exhaustive = tune(tmp_path / "all", everything, workload, effort=Effort(is_exhaustive=True))
    assert found.best is not None
    assert exhaustive.best is not None
    # By its measurement in the whole grid, so that a lucky one counts nothing; the noise is 1%.
    truth = {row.setting: row.value for row in exhaustive.rows}
    assert truth[found.best.setting] >= 0.95 * exhaustive.best.value
    assert clusters.num_starts <= 1.1 * everything.num_starts
    assert not [each for each in found.best.repeats if BOUNDS.broken_by(each)]
    # Every setting says why it did not win.
    for each in (found, exhaustive):
        assert all(row.reason for row in each.rows if row is not each.best)
    assert {row.status for row in found.rows} >= {Status.BEST, Status.SKIPPED}
    accuracy = found.accuracy()
    # What was measured at that rate, but for 1% of noise.
    assert max(accuracy["median_error"].values()) < 0.05
    assert accuracy["num_settings"] >= 1
    assert accuracy["pairs_in_order"] == accuracy["pairs_that_differ"]


def test_measurements_correct_predictions(tmp_path: Path) -> None:
    """After the probes a prompt takes three times as long: the setting that they favour keeps the bound at low rates
    only, and one that was skipped is measured after all."""
    calls = 0

    def cost(options: Options) -> LinearCost:
        nonlocal calls
        calls += 1
        return LinearCost(step=0.006, token=0.0003 if calls <= 4 else 0.0009)

    found = tune(
        tmp_path,
        SimulatedClusters(cost),
        workload_of(**LOADS["long prompts"]),
        bounds=Bounds(itl_ms=90.0),
        axes={"max_num_seqs": (32,), "max_num_batched_tokens": (32, 64, 128, 256)},
        effort=Effort(max_measured=1),
    )
    budgets = {row.setting.value("max_num_batched_tokens"): row for row in found.rows}
    first = budgets[256].prediction
    assert first is not None
    assert first.rate == math.inf
    assert budgets[256].rate is None or budgets[256].rate < math.inf
    assert budgets[64].status is Status.BEST
    assert any("predictions have learned that it may be better" in note for note in found.notes)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    workload = workload_of(**LOADS["short prompts"])
    whole = SimulatedClusters(cost_of, noise=0.0)
    expected = tune(tmp_path / "whole", whole, workload)
    for at in (1, 4, whole.num_measurements - 1):
        directory = tmp_path / f"at {at}"
        first = SimulatedClusters(cost_of, noise=0.0)
        first.interrupt_at = at
        with pytest.raises(KeyboardInterrupt):
            tune(directory, first, workload)
        # A crash in the middle of a line.
        with (directory / "state.jsonl").open("a") as file:
            file.write('{"key": "half')
        second = SimulatedClusters(cost_of, noise=0.0)
        found = tune(directory, second, workload)
        assert found.best is not None
        assert expected.best is not None
        assert found.best.as_json().items() >= {**dict(expected.best.setting.values), "reason": ""}.items()
        # Nothing is measured twice, but for the interrupted measurement and the warm-up of its cluster.
        assert first.num_measurements + second.num_measurements <= whole.num_measurements + 2
    third = SimulatedClusters(cost_of)
    tune(directory, third, workload)
    assert third.num_starts == 0


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "state.jsonl", {"seed": 1}, advice="begin anew").close()
    with pytest.raises(TuningError, match=r"was begun with seed=1 \(now 2\): begin anew"):
        Journal(tmp_path / "state.jsonl", {"seed": 2}, advice="begin anew")


def test_settings_that_fail_are_rows_with_their_reasons(tmp_path: Path) -> None:
    def refuse(setting: Setting, memory: Mapping[str, float]) -> str:
        return "out of memory" if setting.value("max_num_seqs") == 64 else ""

    found = tune(tmp_path, SimulatedClusters(cost_of, refuse=refuse), workload_of(**LOADS["short prompts"]))
    failed = [row for row in found.rows if row.status is Status.FAILED]
    assert failed
    assert {row.reason for row in failed} == {"out of memory"}
    assert found.best is not None
    assert found.best.setting.value("max_num_seqs") < 64
    assert any("the probe seqs 64, tokens 256 fails: out of memory" in note for note in found.notes)
    with pytest.raises(TuningError, match="no setting works; the first: broken"):
        tune(tmp_path / "none", SimulatedClusters(cost_of, refuse=lambda *_: "broken"), workload_of())


def test_the_most_memory_that_works_is_taken(tmp_path: Path) -> None:
    def refuse(setting: Setting, memory: Mapping[str, float]) -> str:
        return "killed" if memory["gpu_memory_utilization"] > 0.93 else ""

    memory = MemoryRange(option="gpu_memory_utilization", values=(0.98, 0.96, 0.94, 0.92, 0.9), why="")
    found = tune(
        tmp_path,
        SimulatedClusters(cost_of, refuse=refuse),
        workload_of(**LOADS["short prompts"]),
        memory=memory,
        axes={"max_num_seqs": (8, 16)},
    )
    assert found.memory == {"gpu_memory_utilization": 0.92}
    assert [note for note in found.notes if "does not work: killed" in note]
    assert found.best is not None


def test_options_that_change_a_step_have_probes_of_their_own(tmp_path: Path) -> None:
    """Two threads make steps faster, which no prediction from one thread's probe could tell."""

    def cost(options: Options) -> LinearCost:
        return LinearCost(step=0.006, token=0.0003 * (1 if options.worker_threads == 2 else 1.8))

    axes = {"max_num_seqs": (8, 32), "worker_threads": (1, 2)}
    found = tune(tmp_path, SimulatedClusters(cost), workload_of(**LOADS["short prompts"]), axes=axes)
    assert found.best is not None
    assert found.best.setting.value("worker_threads") == 2
    assert all(row.reason for row in found.rows if row.setting.value("worker_threads") == 1)


@pytest.mark.parametrize(
    ("axes", "best"),
    [
        ({"tensor_parallel_size": (1, 2, 4)}, 2),
        ({"pipeline_parallel_size": (1, 2)}, 1),
        ({"data_parallel_size": (1, 2)}, 2),
        ({"quantization": ("none", "int8", "int3")}, "int8"),
        ({"block_size": (16, 32)}, 32),
        ({"max_steps_in_flight": (1, 2)}, 2),
    ],
)
def test_other_axes_are_tried_on_their_own_clusters(tmp_path: Path, axes: dict[str, tuple], best: object) -> None:
    """A value that the options refuse, and one with which no cluster starts, are rows with the reason."""
    (name,) = axes

    def cost(options: Options) -> LinearCost:
        return LinearCost(step=0.006, token=0.0003 if getattr(options, name) == best else 0.0006)

    def refuse(setting: Setting, memory: Mapping[str, float]) -> str:
        return "4 does not divide the heads" if setting.value(name) == 4 else ""

    load = workload_of(**LOADS["short prompts"])
    found = tune(tmp_path, SimulatedClusters(cost, refuse=refuse), load, axes={"max_num_seqs": (8,), **axes})
    assert found.best is not None
    assert found.best.setting.value(name) == best
    failed = {row.setting.value(name): row.reason for row in found.rows if row.status is Status.FAILED}
    assert set(failed) == {*axes[name]} & {4, "int3"}
    assert all("4 does not divide the heads" in reason or "int3" in reason for reason in failed.values())


def test_drafts_are_predicted_from_the_outputs_of_a_probe(tmp_path: Path) -> None:
    """A simulated worker says token 0 again and again, which every suffix drafter foresees."""
    axes = {"max_num_seqs": (4, 8), "speculative_config": ("off", "suffix")}
    found = tune(
        tmp_path, SimulatedClusters(cost_of), workload_of(**LOADS["short prompts"]), bounds=Bounds(), axes=axes
    )
    predicted = {row.setting.options.get("speculative_config", "off"): row.prediction for row in found.rows}
    off, suffix = predicted["off"], predicted['{"method": "suffix"}']
    assert off is not None
    assert suffix is not None
    assert suffix.value > 1.2 * off.value


def test_the_end_of_a_short_run_is_no_loss_of_throughput() -> None:
    """16 requests of 20 tokens, one a second: the last is answered 4 s after it came, when no more come."""
    numbers = {"output_tok_s": 16 * 20 / 20.0, "requests_s": 16 / 20.0}
    assert lasting(1.0, numbers) == pytest.approx(20.0)
    assert lasting(math.inf, numbers) == 16.0
    assert lasting(1.0, {"output_tok_s": 0.0, "requests_s": 0.0}) == 0.0


@pytest.mark.parametrize("capacity", [0.5, 3.0, 7.7])
def test_the_rate_comes_down_from_infinity_until_the_bounds_hold(capacity: float) -> None:
    asked: list[float] = []

    def measure(rate: float) -> dict[str, Any]:
        asked.append(rate)
        numbers = {"ttft_ms_p99": 100.0 if rate <= capacity else 9000.0, "itl_ms_p99": 1.0, "e2e_ms_p99": 1.0}
        return {**numbers, "num_errors": 0, "num_requests": 9, "prefix_hit_rate": 0.0, "requests_s": 8.0}

    found = highest_rate(measure, Bounds(ttft_ms=500.0), max_runs=12)
    assert asked[0] == math.inf
    assert found.rate is not None
    assert 0.85 * capacity <= found.rate <= capacity
    assert found.measured["requests_s"] == found.ceiling == 8.0
    none = highest_rate(measure, Bounds(ttft_ms=50.0))
    assert (none.rate, none.at) == (None, asked[-1])
    assert highest_rate(measure, Bounds()).rate == math.inf
    # With a good guess, fewer measurements.
    asked.clear()
    highest_rate(measure, Bounds(ttft_ms=500.0), hint=0.97 * capacity, max_runs=12)
    assert len(asked) <= 6
    # The whole load begins at the rate that was found with a part of it.
    asked.clear()
    again = highest_rate(measure, Bounds(ttft_ms=500.0), start=0.97 * capacity, ceiling=8.0, max_runs=12, close=1.04)
    assert asked[0] == pytest.approx(0.97 * capacity, rel=1e-3)
    assert again.rate is not None
    assert capacity / 1.04 <= again.rate <= capacity
    assert again.ceiling == 8.0


def test_the_next_rate_is_where_a_line_meets_the_bound() -> None:
    """Latency grows with the rate, so two measurements tell more than that one is good and the other too high."""
    asked: list[float] = []

    def measure(rate: float) -> dict[str, Any]:
        asked.append(rate)
        numbers = {"ttft_ms_p99": 100.0 * min(rate, 99.0), "itl_ms_p99": 1.0, "e2e_ms_p99": 1.0}
        return {**numbers, "num_errors": 0, "num_requests": 9, "prefix_hit_rate": 0.0, "requests_s": 8.0}

    found = highest_rate(measure, Bounds(ttft_ms=700.0), start=5.0, max_runs=4, close=1.04)
    assert asked[:2] == [5.0, 6.25]
    assert found.rate is not None
    assert 6.7 <= found.rate <= 7.0
    # A rate that is a little too high is lowered a little.
    asked.clear()
    highest_rate(measure, Bounds(ttft_ms=700.0), start=7.3, max_runs=2)
    assert asked == [7.3, 6.57]


def test_every_part_of_the_load_may_have_the_hit_rate(tmp_path: Path) -> None:
    """The first request finds nothing in the cache, which half of the load must not be blamed for."""
    model = make_tiny_model(tmp_path / "tiny")
    load = workload_to_tune(
        LoadFlags(prompt_len="250", output_len="4"),
        24,
        load_options(None, {"model": str(model)}, {}),
        hit_rate=0.6,
    )
    for share in (0.5, 1.0):
        requests = load.requests(math.inf, share=share)
        first, *others = (tuple(each.prompt) for each in requests)
        common = min(sum(a == b for a, b in zip(first, each, strict=True)) for each in others)
        assert common // 16 * 16 * len(others) >= 0.6 * 250 * len(requests)


def test_requests_that_the_model_cannot_take_are_left_out(tmp_path: Path) -> None:
    workload = workload_of(prompt_len="uniform:400:600", output_len="8")
    assert 0 < len(workload.requests(math.inf)) < 16
    assert workload.longest <= 512
    with pytest.raises(TuningError, match="longer than max_model_len=512"):
        workload_of(prompt_len="600").requests(math.inf)


def test_clusters_that_need_keys_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"api_keys_file='keys\.yaml': clusters that are measured here"):
        LocalClusters(GivenOptions(config=None, flags={"api_keys_file": "keys.yaml"}), tmp_path)


def test_memory_on_a_cpu_is_what_is_free_or_what_the_requests_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = load_options(None, {"model": str(make_tiny_model(tmp_path / "tiny")), "load_format": "dummy"}, {})
    machine = Machine(options=options)
    free = HostMemory(available=64 * 2**30, limit="a test's")
    monkeypatch.setattr(memory_subject, "host_memory", lambda: free)
    found = memory_values(machine, max_num_seqs=64, longest=200)
    needed = found.values
    assert (found.option, found.why) == ("kv_cache_memory", "the requests need no more")
    # Two layers of keys and values, two heads of 8 numbers of 2 or 4 bytes, 64 rows of 13 blocks, twice.
    assert 64 * 200 * 2 * 2 * 16 * 2 / 2**30 <= needed[0] <= 0.05
    assert list(needed) == sorted(needed, reverse=True)
    free = HostMemory(available=2 * 2**30, limit="a test's")
    found = memory_values(machine, max_num_seqs=65_536, longest=256)
    assert found.why == "no more memory is free"
    assert 1.0 < found.values[0] < 1.8
    with pytest.raises(TuningError, match="starts with none of 2, 1: too much"):
        highest_that_works([2.0, 1.0], lambda value: "too much")


@pytest.mark.parametrize(("max_num_seqs", "num_turns"), [((2, 64), 2), ((63, 64), 4)])
def test_a_final_ends_once_a_setting_is_clearly_better(
    tmp_path: Path, max_num_seqs: tuple[int, ...], num_turns: int
) -> None:
    axes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": (64,)}
    found = tune(
        tmp_path,
        SimulatedClusters(cost_of),
        workload_of(**LOADS["short prompts"]),
        axes=axes,
        effort=Effort(margin=1.0, rounds=4),
    )
    assert found.best is not None
    assert num_turns == 4 or found.best.setting.value("max_num_seqs") == 64
    assert [len(row.repeats) for row in found.rows] == [num_turns, num_turns]


def test_finalists_that_kept_the_bounds_by_luck_are_slowed_down(tmp_path: Path) -> None:
    """One setting: after the probe and the search, the machine is slow for the two turns of the final."""
    clusters = SimulatedClusters(
        lambda options: LinearCost(step=0.02 if clusters.num_measurements in (5, 6) else 0.006)
    )
    axes = {"max_num_seqs": (8,), "max_num_batched_tokens": (64,)}
    found = tune(tmp_path, clusters, workload_of(**LOADS["short prompts"]), bounds=Bounds(itl_ms=10.0), axes=axes)
    assert found.best is not None
    assert found.best.rate is not None
    assert found.best.rate < math.inf
    assert (found.best.reason, len(found.best.repeats)) == ("", 1)
    # The probe's cluster, and one for all measurements of the same setting.
    assert clusters.num_starts == 2
    assert clusters.num_running == 0
