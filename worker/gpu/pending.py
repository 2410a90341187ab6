"""A step that is queued on the device, its results, and the device's state of every permanent row.

Shape suffixes: N sampling rows, Q positions whose logprobs are asked for, K most likely tokens.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from kernels.step_inputs.triton import write_tables
from worker.device.device import Event
from worker.device.staging import Part, StepSlot
from worker.sampling.gpu_logprobs import LogprobTensors
from worker.step.inputs import Logprobs, StepInputs, StepOutputs

# Rows, places and block ids, on their way to the device.
StagedTables = tuple[Part, Part, Part]


class DeviceRows:
    """The device's state of every permanent row: its block table and its last token.

    Freeing a row changes nothing here: a new row overwrites all entries that it will read.
    """

    def __init__(self, device: torch.device, *, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: the most blocks of a row."""
        self.block_tables_RB = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens_R = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def stage(self, inputs: StepInputs, slot: StepSlot) -> StagedTables | None:
        """Stages a step's changes, if there are any."""
        if (changes := inputs.table_changes) is None:
            return None
        return slot.add(changes.rows_C), slot.add(changes.places_C), slot.add(changes.block_ids_C)

    def apply(self, changes: StagedTables | None) -> None:
        """Writes staged changes to the tables; call it after the step is sent."""
        if changes is not None:
            write_tables(self.block_tables_RB, *(part.tensor for part in changes))


_log = logging.getLogger("octavo.worker")

# In int32 numbers: arrays begin at multiples of 64 bytes, so that kernels can use aligned accesses.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Requested logprobs. positions_Q: int64, as in worker.step.inputs.Logprobs."""

    positions_Q: np.ndarray
    num_top: int


class ResultLayout:
    """The layout of a step's results in one int32 array."""

    def __init__(
        self,
        *,
        num_rows: int,
        width: int,
        has_counts: bool,
        sampled: AskedLogprobs | None = None,
        prompts: AskedLogprobs | None = None,
    ) -> None:
        """width: the most tokens that a row may sample. has_counts: False if each row samples exactly one token."""
        self.num_rows, self.width, self.has_counts = num_rows, width, has_counts
        self._sampled, self._prompts = sampled, prompts
        self.size = 0
        self._tokens = self._place(num_rows * width)
        self._counts = self._place(num_rows if has_counts else 0)
        self._sampled_places = self._logprob_places(sampled)
        self._prompt_places = self._logprob_places(prompts)

    @property
    def is_only_tokens(self) -> bool:
        """True if the results are one token per row, and nothing else."""
        return not self.has_counts and self._sampled is None and self._prompts is None

    def tokens_of(self, results: torch.Tensor) -> torch.Tensor:
        """The view for tokens, int32 [N, width], for the device to write to."""
        return results[self._tokens].view(self.num_rows, self.width)

    def counts_of(self, results: torch.Tensor) -> torch.Tensor:
        """The view for counts, int32 [N]."""
        return results[self._counts]

    def sampled_of(self, results: torch.Tensor) -> LogprobTensors:
        return _tensors(results, self._sampled, self._sampled_places)

    def prompts_of(self, results: torch.Tensor) -> LogprobTensors:
        return _tensors(results, self._prompts, self._prompt_places)

    def outputs(self, results: np.ndarray, seconds: float) -> StepOutputs:
        """Copies the outputs from what the host has received."""
        return StepOutputs(
            tokens_ND1=results[self._tokens].reshape(self.num_rows, self.width).copy(),
            counts_N=results[self._counts].copy() if self.has_counts else np.ones(self.num_rows, np.int32),
            logprobs=_logprobs(results, self._sampled, self._sampled_places),
            prompt_logprobs=_logprobs(results, self._prompts, self._prompt_places),
            seconds=seconds,
        )

    def _place(self, size: int) -> slice:
        start = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return slice(start, start + size)

    def _logprob_places(self, asked: AskedLogprobs | None) -> Sequence[slice]:
        if asked is None:
            return ()
        count = len(asked.positions_Q)
        return [self._place(size) for size in (count, count, count * asked.num_top, count * asked.num_top)]


def _tensors(results: torch.Tensor, asked: AskedLogprobs | None, places: Sequence[slice]) -> LogprobTensors:
    assert asked is not None
    chosen, ranks, top_ids, top = (results[place] for place in places)
    shape = len(asked.positions_Q), asked.num_top
    return LogprobTensors(chosen.view(torch.float32), ranks, top_ids.view(shape), top.view(torch.float32).view(shape))


def _logprobs(results: np.ndarray, asked: AskedLogprobs | None, places: Sequence[slice]) -> Logprobs | None:
    if asked is None:
        return None
    chosen, ranks, top_ids, top = (results[place] for place in places)
    shape = len(asked.positions_Q), asked.num_top
    return Logprobs(
        positions=asked.positions_Q,
        chosen=chosen.view(np.float32).copy(),
        ranks=ranks.astype(np.int64),
        top_ids_K=top_ids.reshape(shape).astype(np.int64),
        top_K=top.view(np.float32).reshape(shape).copy(),
    )


class PendingStep:
    """A step in flight. Its results are copied from pinned memory once the device has reached the step's end."""

    def __init__(self, began: Event, event: Event, layout: ResultLayout, results: np.ndarray) -> None:
        """results: int32, pinned; filled once `event` is reached."""
        # The step's end.
        self.event = event
        self._began, self._layout = began, layout
        self._results: np.ndarray | None = results
        self._outputs: StepOutputs | None = None

    @property
    def is_done(self) -> bool:
        """True if the device has finished the step, so that `wait` returns at once."""
        return self._outputs is not None or self.event.query()

    def wait(self) -> StepOutputs:
        """Waits for the step's end. Returns the same outputs in each call; the caller may keep them."""
        if self._outputs is None:
            self.event.synchronize()
            assert self._results is not None
            self._outputs = self._layout.outputs(self._results, self.event.seconds_since(self._began))
            # A later step will reuse the memory.
            self._results = None
        return self._outputs


class StepWaiter:
    """A thread that waits for one event after the other, without holding the GIL. The first call starts it. It is a
    daemon, so a device that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Event, Callable[[], None]]] = SimpleQueue()
        self._has_begun = False

    def call_when_reached(self, event: Event, callback: Callable[[], None]) -> None:
        """Calls callback on the thread once the device has reached the event. Pass events in the device's order."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name="step-waiter", daemon=True).start()
        self._queue.put((event, callback))

    def _run(self) -> None:
        while True:
            event, callback = self._queue.get()
            try:
                event.synchronize()
            except RuntimeError as error:
                # The caller that takes the step's result gets the same error, and can handle it.
                _log.debug("waiting for a step failed: %s", error)
            callback()
