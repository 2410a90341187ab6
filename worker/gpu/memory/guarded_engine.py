"""An engine that says what to do when a step finds no memory."""

from configs.options import Options
from worker.gpu.device import Device
from worker.gpu.engine import GpuEngine
from worker.gpu.memory.out_of_memory import out_of_memory, serving_needs_more
from worker.gpu.memory.use import MemoryUse
from worker.gpu.pending import PendingStep
from worker.gpu.step_inputs import StepInputs


class GuardedEngine:
    """A worker.gpu.runner.StepEngine. Memory is taken when a step is begun, if ever: those that are under way have
    theirs."""

    def __init__(self, engine: GpuEngine, device: Device, options: Options, use: MemoryUse) -> None:
        """use: as measured at the start."""
        self._engine, self._device, self._options, self._use = engine, device, options, use

    def begin(self, inputs: StepInputs) -> PendingStep:
        """Raises StepError if memory is lacking."""
        with out_of_memory(lambda: serving_needs_more(self._options, self._device.memory(), self._use)):
            return self._engine.begin(inputs)

    def reset(self) -> None:
        self._engine.reset()
