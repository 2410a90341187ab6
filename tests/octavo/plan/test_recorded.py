"""What-if: a recorded trace gives back its requests, the times of its steps, and predictions under other settings."""

from pathlib import Path

import numpy as np
import pytest

from octavo.lab.errors import PlanError
from octavo.plan.costs.fitted import fit
from octavo.plan.recorded import read_recording
from octavo.plan.simulate import simulate
from octavo.plan.workload import Workload
from scheduler.core.messages import Speculation
from tests.support.scheduler.plan import COST, load, record, settings


def test_a_trace_gives_back_requests_costs_and_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, core = load(), settings(max_num_seqs=4)
    run = record(tmp_path / "a.trace", monkeypatch, workload, core)
    recording = read_recording([tmp_path / "a.trace"])
    again = recording.workload()
    assert (len(again), recording.num_left_out, recording.num_replicas) == (40, 0, 1)
    np.testing.assert_allclose(again.arrivals, workload.arrivals - workload.arrivals[0], atol=1e-6)
    assert again.output_lens.tolist() == workload.output_lens.tolist()
    assert [again.prompt(i) for i in range(40)] == [workload.prompt(i) for i in range(40)]
    cost = fit(recording.measurements().samples)
    predicted = simulate(core, cost, again)
    # The steps are linear in what is fitted, so that nothing is lost.
    assert cost.median_error < 1e-3
    assert predicted.num_steps == run.num_steps
    assert predicted.duration == pytest.approx(run.duration, rel=1e-3)
    assert predicted.measured()["ttft_ms_p99"] == pytest.approx(run.measured()["ttft_ms_p99"], rel=1e-2)


@pytest.mark.parametrize("changes", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 16}, {"num_blocks": 70}], ids=str)
def test_other_settings_are_predicted_as_they_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    record(tmp_path / "a.trace", monkeypatch, load(), settings(max_num_seqs=4))
    recording = read_recording([tmp_path / "a.trace"])
    other = settings(**({"max_num_seqs": 4} | changes))
    predicted = simulate(other, fit(recording.measurements().samples), recording.workload())
    actual = simulate(other, COST, load())
    for key in ("ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99"):
        assert predicted.measured()[key] == pytest.approx(actual.measured()[key], rel=0.02), key


def test_outputs_are_said_again_so_that_later_prompts_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn of a chat has the first one's output in its prompt."""
    output = list(range(100, 140))
    first = [*range(1, 17)]
    workload = Workload(
        arrivals=np.array([0.0, 100.0]),
        prompt_lens=np.array([16, 60]),
        output_lens=np.array([40, 2]),
        prefix_ids=np.array([-1, -1]),
        prefix_lens=np.array([0, 0]),
        prompts=[first, [*first, *output, 5, 6, 7, 8]],
        outputs=[output, [1, 2]],
    )
    run = record(tmp_path / "a.trace", monkeypatch, workload, settings())
    # All full blocks of 8: the first prompt, and the output but for its last token, whose KV is never computed.
    assert run.num_prefix_hits == 48
    recording = read_recording([tmp_path / "a.trace"])
    assert [each.output for each in recording.requests] == [output, [1, 2]]
    again = simulate(settings(), COST, recording.workload())
    assert again.num_prefix_hits == run.num_prefix_hits


def test_drafts_are_right_or_wrong_by_the_recorded_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = [7, 8, 9, 10] * 12
    workload = Workload(
        arrivals=np.zeros(1),
        prompt_lens=np.array([8]),
        output_lens=np.array([len(repeated)]),
        prefix_ids=np.array([-1]),
        prefix_lens=np.array([0]),
        prompts=[[7, 8, 9, 10, 7, 8, 9, 10]],
        outputs=[repeated],
    )
    record(tmp_path / "a.trace", monkeypatch, workload, settings())
    again = read_recording([tmp_path / "a.trace"]).workload()
    speculating = settings(speculation=Speculation(drafters=("suffix",)))
    run = simulate(speculating, COST, again)
    assert run.num_output_tokens == len(repeated)
    assert 0 < run.num_accepted_tokens <= run.num_draft_tokens
    assert run.num_steps < len(repeated) / 2


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing\n")
    with pytest.raises(PlanError, match=r"--trace: .*x is not a trace"):
        read_recording([tmp_path / "x"])
