"""An engine that keeps its inputs; the test decides when steps are done, and with which outputs."""

import threading

import numpy as np

from worker.gpu.pending import PendingStep
from worker.step.inputs import Logprobs, StepInputs, StepOutputs


class HeldEvent:
    """An event that the test reaches."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self) -> None: ...

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        assert self._reached.wait(60), "an event was never reached"

    def seconds_since(self, earlier: "HeldEvent") -> float:
        return 0.0

    def reach(self) -> None:
        self._reached.set()


class HeldStep(PendingStep):
    def __init__(self, inputs: StepInputs) -> None:
        self.inputs, self.event = inputs, HeldEvent()
        self._outputs: StepOutputs | None = None

    @property
    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> StepOutputs:
        self.event.synchronize()
        assert self._outputs is not None
        return self._outputs

    def finish(self, *tokens: list[int], logprobs: Logprobs | None = None, prompts: Logprobs | None = None) -> None:
        """tokens: the tokens of each sampling row."""
        assert len(tokens) == len(self.inputs.sampling_N)
        width = max(map(len, tokens), default=1)
        self._outputs = StepOutputs(
            tokens_ND1=np.array([[*each, *[0] * (width - len(each))] for each in tokens], np.int32).reshape(-1, width),
            counts_N=np.array([len(each) for each in tokens], np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompts,
            seconds=0.25,
        )
        self.event.reach()


class HeldEngine:
    def __init__(self) -> None:
        self.steps: list[HeldStep] = []
        self.num_resets = 0

    def begin(self, inputs: StepInputs) -> HeldStep:
        self.steps.append(HeldStep(inputs))
        return self.steps[-1]

    def reset(self) -> None:
        self.num_resets += 1
