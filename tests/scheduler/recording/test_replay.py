"""A recorded core's calls, made again, give the same plans; where they do not, the replay names the difference."""

from itertools import chain, pairwise
from pathlib import Path

import pytest

from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, StopRules
from scheduler.core.pacing.pace import Pace
from scheduler.core.pacing.prices import Prices
from scheduler.core.planner import Planner
from scheduler.core.state.running import Rows
from scheduler.recording.file import RecordingWriter
from scheduler.recording.replay import replay
from tests.fakes.model import FakeSampling
from tests.properties.walk import WalkError, walk
from tests.properties.world import World
from tests.support.scheduler.recordings import record, recorded

NUM_WALKS = 12


def test_every_plan_of_a_walk_is_made_again_whatever_happens_on_it(tmp_path: Path):
    num_plans = num_empty = num_without = num_losses = num_preemptions = 0
    for index in range(NUM_WALKS):
        path = tmp_path / f"{index}.trace"
        writer = RecordingWriter(path, 1 << 20, 0)
        walked = walk(f"replay/{index}", core_class=recorded(writer))
        writer.close()
        (replayed,) = replay([path])
        assert replayed.difference is None
        empty = walked.seen["an empty step"]
        assert replayed.num_plans == walked.num_steps + empty
        num_plans += walked.num_steps
        num_empty += empty
        num_without += replayed.num_without_plan
        num_losses += replayed.num_epochs_lost
        num_preemptions += replayed.num_preemptions
    assert min(num_plans, num_empty, num_without, num_losses, num_preemptions) > 0


def test_limits_by_measured_times_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, before = tmp_path / "run.trace", tmp_path / "run.trace.1"
    target = {"inter_token_latency_target": 0.3, "least_prefill_tokens": 2}
    core = record(path, num_requests=80, max_bytes=30_000, **target).core
    assert core.stats.num_limited_steps > 20
    # The second file begins with what was learned in the first.
    assert [each.difference for each in replay([before, path])] == [None, None]
    monkeypatch.setattr(Pace, "predict", lambda *_: 0.0)
    monkeypatch.setattr(Prices, "num_prefill_tokens", lambda *_, most: most)
    assert any(each.difference for each in replay([before, path]))


def test_a_file_that_is_full_goes_on_in_another_that_replays_by_itself(tmp_path: Path):
    path, before = tmp_path / "run.trace", tmp_path / "run.trace.1"
    num_steps = record(path, num_requests=60, max_bytes=10_000).num_plans
    # A file's bound is max_bytes, or twice its snapshot if that is more.
    assert max(path.stat().st_size, before.stat().st_size) < 40_000
    alone = [replay([each])[0] for each in (before, path)]
    assert [each.difference for each in alone] == [None, None]
    assert alone[0].origin.number + 1 == alone[1].origin.number > 2
    assert 0 < sum(each.num_plans for each in alone) < num_steps
    # Files may be given in any order; the second must begin with the state that the first one led to.
    together = replay([path, before])
    assert [each.path for each in together] == [before, path]
    assert [each.num_plans for each in together] == [each.num_plans for each in alone]


def test_a_second_file_that_does_not_begin_where_the_first_one_led_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, before = tmp_path / "run.trace", tmp_path / "run.trace.1"
    record(path, num_requests=60, max_bytes=10_000)
    # The first plans happen to be equal, but the cached blocks are not.
    monkeypatch.setattr(Planner, "_count_first_run", lambda *_: None)
    (replayed,) = replay([before])
    assert replayed.difference is None
    *_, last = replay([before, path])
    assert last.difference is not None
    assert last.difference.field.startswith("state.")


def test_the_first_difference_is_named_with_the_calls_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(tmp_path / "run.trace")
    monkeypatch.setattr(Rows, "take", lambda self: self._free.pop(0))
    (replayed,) = replay([tmp_path / "run.trace"])
    difference = replayed.difference
    assert difference is not None
    assert (difference.step, difference.field, difference.expected, difference.got) == (1, "new_rows[0].row", "0", "3")
    assert "submit group 1 (request-1): " in difference.calls[-2]
    assert "schedule step 1: 1 new rows, 1 chunks, 0 freed rows" in difference.calls[-1]
    assert replayed.num_plans == 0


def test_a_core_that_fails_fails_again_in_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = Planner.plan

    def fail_in_step_5(self: Planner, now: float) -> Plan | None:
        made = plan(self, now)
        if made is not None and made.step == 5:
            raise RuntimeError("a bug")
        return made

    with monkeypatch.context() as patched:
        patched.setattr(Planner, "plan", fail_in_step_5)
        writer = RecordingWriter(tmp_path / "run.trace", 1 << 20, 0)
        with pytest.raises(WalkError, match="a bug"):
            walk("fails", core_class=recorded(writer), changes={"max_num_batched_tokens": 64})
        writer.close()
        (replayed,) = replay([tmp_path / "run.trace"])
    assert replayed.difference is not None
    assert (replayed.difference.field, replayed.difference.got) == ("call", "RuntimeError: a bug")
    assert (replayed.num_plans, replayed.difference.step) == (4, 4)
    # Without the bug, the replay gets a plan where the recording has none.
    (replayed,) = replay([tmp_path / "run.trace"])
    assert replayed.difference is not None
    assert (replayed.difference.field, replayed.difference.expected) == ("plan", "no plan")


def test_a_request_is_explained_from_its_traces(tmp_path: Path):
    path = tmp_path / "run.trace"
    core = record(path, num_requests=60, max_bytes=30_000, max_finished_timelines=1000).core
    paths = [path, tmp_path / "run.trace.1"]
    # The latest requests ended in the file; for those that were live when it began, the snapshot has the rest.
    for group in (60, 55, 50):
        expected = core.explain(f"request-{group}")
        found = chain.from_iterable(each.timelines for each in replay(paths, explain=f"request-{group}"))
        assert [each for each in found if each.is_finished] == expected != []
    assert not any(each.timelines for each in replay(paths, explain="nobody"))


def test_in_steady_decode_a_step_takes_its_tokens_and_little_more(tmp_path: Path):
    num_rows, path = 64, tmp_path / "run.trace"
    writer = RecordingWriter(path, 1 << 30, 0)
    settings = CoreSettings(
        block_size=64, num_blocks=200, max_model_len=100, max_num_seqs=num_rows, max_num_batched_tokens=256
    )
    world = World(settings, core_class=recorded(writer))
    for group in range(1, num_rows + 1):
        stop = StopRules(max_tokens=60, ignore_eos=True)
        choices = (ChoiceStart(choice=0),)
        world.submit(
            GroupRequest(
                group=group,
                request_id=f"request-{group}",
                prompt_token_ids=(group % 7,),
                choices=choices,
                stop=stop,
                sampling=FakeSampling(scope=0, seed=group),
            )
        )
    sizes = []
    for _ in range(40):
        assert world.schedule()
        world.deliver()
        writer.flush()
        sizes.append(path.stat().st_size)
    writer.close()
    assert max(after - before for before, after in pairwise(sizes[1:])) < 4 * num_rows + 100
