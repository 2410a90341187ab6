"""When a GPU rank captures graphs, drops them and leaves its groups: NCCL does not end a group whose calls are in a
graph, and a step that waits for a dead rank ends only when its own rank leaves."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from protos import inference_pb2, step_pb2
from tests.fakes.fake_model import VOCAB_SIZE, fake_config
from tests.fakes.gpu.gpu_engine import HeldEngine, HeldEvent
from tests.fakes.gpu.gpu_model import fake_kv_cache
from worker.device.device import InterpretedDevice
from worker.gpu.ranks import GpuRanks
from worker.gpu.runner import GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.parallel.groups import Groups, Rehearsal
from worker.step.rows import Rows

ALONE = Groups()


class WatchedGroup(Rehearsal):
    def __init__(self, log: list[str]) -> None:
        super().__init__(0, 2)
        self._log = log

    def leave(self) -> None:
        self._log.append("left")


class Graphs:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def drop(self) -> None:
        self._log.append("dropped")


class Device(InterpretedDevice):
    """A device that does no work before the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[HeldEvent] = []

    def event(self) -> Any:
        self.events.append(HeldEvent())
        return self.events[-1]


class Engine(HeldEngine):
    graphs: Any = None

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def reset(self) -> None:
        self._log.append("waited")


@dataclass
class Setting:
    log: list[str] = field(default_factory=list)
    device: Device = field(default_factory=Device)
    groups: Groups = ALONE

    def __post_init__(self) -> None:
        self.engine = Engine(self.log)
        self.ranks = GpuRanks(self.device, self, self.engine, self._capture, ALONE)  # type: ignore[arg-type]

    def _capture(self, settle: Any) -> Any:
        self.log.append("step")
        settle()
        self.log.append("captured")
        return Graphs(self.log)

    def others(self) -> Groups:
        return Groups(tensor=WatchedGroup(self.log))

    def runner(self) -> GpuRunner:
        rows = Rows(
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_model_len=32,
            block_size=8,
            num_blocks=8,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=fake_config().eos_token_ids,
        )
        swap_space = GpuSwapSpace(fake_kv_cache(), InterpretedDevice(), 0)
        return GpuRunner(
            self.engine, rows, inference_pb2.ModelInfo(), swap_space=swap_space, max_steps_in_flight=2, ranks=self.ranks
        )

    def reach(self) -> None:
        """Completes the last step; called while waiting for it."""
        self.device.events[-1].reach()


def test_graphs_are_captured_with_the_groups_and_dropped_before_they_are_left() -> None:
    setting = Setting()
    runner, groups = setting.runner(), setting.others()
    runner.join(groups, setting.reach)
    assert setting.groups is groups
    assert setting.engine.graphs is not None
    assert setting.log == ["step", "captured"]
    runner.join(setting.others(), setting.reach)
    assert setting.log[2:] == ["dropped", "left", "step", "captured"]
    runner.join(None)
    assert setting.log[6:] == ["dropped", "left"]
    assert (setting.engine.graphs, setting.groups) == (None, ALONE)


def test_a_rank_that_is_told_to_give_up_does_not_wait_for_the_others_step() -> None:
    setting = Setting()

    def overtaken() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        setting.runner().join(setting.others(), overtaken)
    assert setting.log == ["step", "left"]
    assert (setting.engine.graphs, setting.groups) == (None, ALONE)


def test_steps_under_way_are_waited_for_when_their_group_is_left() -> None:
    setting = Setting()
    runner = setting.runner()
    runner.join(setting.others(), setting.reach)
    new = step_pb2.NewRow(row=0, sequence=1, token_ids=[5], num_prompt_tokens=1, block_ids=[1])
    runner.begin(step_pb2.StepPlan(epoch=1, step=3, new_rows=[new], rows=[0], num_tokens=[1]))
    assert setting.groups.tensor.step == 3
    setting.log.clear()
    runner.reset()
    assert setting.log == ["dropped", "left", "waited"]
    # Between epochs no step is in flight, and a group that was just joined stays.
    runner.join(setting.others(), setting.reach)
    setting.log.clear()
    runner.reset()
    assert setting.log == ["waited"]
