"""Whom a rank on a GPU computes with, and the graphs that hold calls to them."""

import time
from collections.abc import Callable

from worker.device.device import Device
from worker.gpu.engine import GpuEngine, StepGraphs
from worker.gpu.executor import GpuModel
from worker.parallel.groups import Groups

# Between looks at whether the GPU has come to an end, which waits for all ranks.
_PAUSE_S = 0.001


class GpuRanks:
    """Graphs hold the calls of one epoch's groups. So they are captured when the ranks have met, by all of them at the
    same time, in the same order, for the step that goes before a capture is one that all compute; and they are dropped
    before the groups are left, which would wait for them."""

    def __init__(
        self,
        device: Device,
        model: GpuModel,
        engine: GpuEngine,
        capture: Callable[[Callable[[], None]], StepGraphs | None],
        without_others: Groups,
    ) -> None:
        """capture: makes the engine's graphs, calling what it is given when a step of all ranks is under way; None:
        there are none. without_others: what stands for the groups meanwhile."""
        self._device, self._model, self._engine, self._capture = device, model, engine, capture
        self._without_others = without_others
        self._graphs: StepGraphs | None = None
        model.groups = without_others

    def join(self, groups: Groups, while_waiting: Callable[[], None]) -> None:
        """while_waiting: called again and again while this rank waits for the others' part of a step, which may never
        come; may raise, which leaves the groups."""

        def settle() -> None:
            end = self._device.event()
            end.record()
            while not end.query():
                while_waiting()
                time.sleep(_PAUSE_S)

        self.leave()
        self._model.groups = groups
        try:
            self._engine.graphs = self._graphs = self._capture(settle)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Whatever of this rank's steps waits for others ends, with numbers that mean nothing."""
        self._engine.graphs = None
        if self._graphs is not None:
            self._graphs.drop()
            self._graphs = None
        self._model.groups.leave()
        self._model.groups = self._without_others

    def begin_step(self, step: int) -> None:
        """For messages."""
        self._model.groups.begin_step(step)
