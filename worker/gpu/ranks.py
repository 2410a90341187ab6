"""The groups of ranks that a rank on a GPU computes with, and the graphs that hold their collective calls."""

import time
from collections.abc import Callable

from worker.device.device import Device
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor, StepGraphs
from worker.parallel.groups import Groups

# Between polls for the end of a step that waits for all ranks.
_PAUSE_S = 0.001


class GpuRanks:
    """Joins and leaves the groups of an epoch, and captures and drops the graphs that hold their collective calls.

    All ranks capture at the same time and in the same order, once they are connected, since they all compute the step
    that precedes each capture. Graphs are dropped before the groups are left: leaving would wait for them.
    """

    def __init__(
        self,
        device: Device,
        model: GpuExecutor,
        engine: GpuEngine,
        capture: Callable[[Callable[[], None]], StepGraphs | None],
        without_others: Groups,
    ) -> None:
        """capture: makes the engine's graphs, or returns None if there are none; it calls its argument while a step of
        all ranks is in flight. without_others: stands in for the groups until the rank joins some."""
        self._device, self._model, self._engine, self._capture = device, model, engine, capture
        self._without_others = without_others
        self._graphs: StepGraphs | None = None
        model.groups = without_others

    def join(self, groups: Groups, while_waiting: Callable[[], None]) -> None:
        """Joins the groups and captures the graphs. while_waiting: called repeatedly while this rank waits for the
        others' part of a step, which may never come; if it raises, the groups are left again."""

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
        """Leaves the groups and drops the graphs. Steps of this rank that wait for others end, with garbage results."""
        self._engine.graphs = None
        if self._graphs is not None:
            self._graphs.drop()
            self._graphs = None
        self._model.groups.leave()
        self._model.groups = self._without_others

    def begin_step(self, step: int) -> None:
        """Tells the groups the step's number, for their error messages."""
        self._model.groups.begin_step(step)
