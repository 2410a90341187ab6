"""What a pipeline stage gets of the others in each step, and gives them.

The residual stream goes from stage to stage. What the last stage sampled goes to all before it, whose rows are to hold
the same: they add it when a plan names such a row again, by when it has come or is on its way, for a sequence is in one
step in flight at most.

Shape suffixes: S scheduled rows, N sampling rows, D drafts of the longest row, T tokens of the step, E hidden size.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from protos import step_pb2
from worker.parallel.groups import PipelineLink, Transfer
from worker.step.inputs import BatchRows
from worker.step.results import StepTokens
from worker.step.rows import Rows

# Channels of a PipelineLink.
_STREAM, _SAID = 0, 1


@dataclass(frozen=True, slots=True)
class _Incoming:
    tensor: torch.Tensor
    transfer: Transfer

    def wait(self) -> torch.Tensor:
        self.transfer.wait()
        return self.tensor


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """What is on its way for one step. None: nothing of the kind."""

    # float32 [T, E]
    stream: _Incoming | None
    # As SampledTokens has it.
    said: _Incoming | None


class SampledTokens:
    """What the rows of a step said, as it travels: int32 [2 S + drafts].

    First, of each row, how many of its drafts were accepted, inverted (~) if its logits were not finite. Then, row
    after row, room for a token more than it has drafts. What is there of a row that does not sample means nothing.
    """

    def __init__(self, num_drafts_S: np.ndarray) -> None:
        """num_drafts_S: int64."""
        widths_S = num_drafts_S + 1
        self._num_rows, self._starts_S = len(widths_S), widths_S.cumsum() - widths_S
        self.size = self._num_rows + int(widths_S.sum())

    def message(self, places_N: np.ndarray, said: StepTokens) -> torch.Tensor:
        """places_N: of the sampling rows among the S."""
        message = np.zeros(self.size, np.int32)
        accepted_N = said.counts_N - 1
        message[places_N] = np.where(said.failed_N, ~accepted_N, accepted_N)
        tokens = message[self._num_rows :]
        for turn in range(said.tokens_ND1.shape[1]):
            says = np.flatnonzero(said.counts_N > turn)
            tokens[self._starts_S[places_N[says]] + turn] = said.tokens_ND1[says, turn]
        return torch.from_numpy(message)

    def append(self, message: torch.Tensor, rows: Rows, rows_N: np.ndarray, places_N: np.ndarray) -> None:
        """Adds what was said to the rows, whose drafts are settled."""
        accepted_S, tokens = np.split(message.numpy(), [self._num_rows])
        accepted_N = accepted_S[places_N]
        failed_N = accepted_N < 0
        counts_N = np.where(failed_N, ~accepted_N, accepted_N) + 1
        rows.failed_R[rows_N] |= failed_N
        for turn in range(int(counts_N.max(initial=0))):
            says = np.flatnonzero(counts_N > turn)
            rows.append(rows_N[says], tokens[self._starts_S[places_N[says]] + turn])


@dataclass(frozen=True, slots=True)
class _UnsettledStep:
    """Of a stage before the last: computed, but not yet what its rows said."""

    step: int
    rows_N: np.ndarray
    places_N: np.ndarray
    num_drafts_N: np.ndarray | None
    layout: SampledTokens
    said: _Incoming


class StageTraffic:
    """Of one rank in one epoch. `expect` may be called by another thread than the rest."""

    def __init__(self, link: PipelineLink, rows: Rows, *, hidden_size: int, max_steps_in_flight: int) -> None:
        self._link, self._rows = link, rows
        self._hidden_size, self._max_steps_in_flight = hidden_size, max_steps_in_flight
        self.is_first, self.is_last = link.stage == 0, link.stage == link.num_stages - 1
        # gloo reads the memory of what is sent until the receiver has it.
        self._sent: deque[list[Transfer]] = deque()
        self._unsettled: deque[_UnsettledStep] = deque()
        # The step that each row sampled in last, and of which it is not known here what it said; 0: none.
        self._unsettled_step_R = np.zeros(rows.max_num_seqs, np.int64)

    def expect(self, plan: step_pb2.StepPlan) -> ExpectedStep:
        """Begins to receive what the others will send for a step. Raises CollectiveError."""
        num_decodes = len(plan.decode_rows) // 2
        num_tokens, num_rows = num_decodes + sum(plan.num_tokens), num_decodes + len(plan.rows)
        stream = said = None
        if num_tokens > self._rows.max_num_batched_tokens or num_rows > self._rows.max_num_seqs:
            # It is refused when its turn comes.
            return ExpectedStep(stream, said)
        if not self.is_first and num_tokens:
            stream = self._receive(torch.empty(num_tokens, self._hidden_size), self._link.stage - 1, plan, _STREAM)
        if not self.is_last and num_rows:
            size = 2 * num_rows + sum(plan.num_drafts)
            said = self._receive(torch.empty(size, dtype=torch.int32), self._link.num_stages - 1, plan, _SAID)
        return ExpectedStep(stream, said)

    def settle(self, plan: step_pb2.StepPlan) -> None:
        """Before a plan is applied: adds to the rows what steps before it sampled, up to the last one that had a row
        that the plan names. Waits for it. Raises CollectiveError."""
        if not self._unsettled:
            return
        named = _named_rows(plan)
        # Rows that do not exist are the plan's fault, as will be said.
        last = int(self._unsettled_step_R[named[named < len(self._unsettled_step_R)]].max(initial=0))
        while self._unsettled and self._unsettled[0].step <= last:
            self._settle(self._unsettled.popleft())

    def pass_on(
        self, plan: step_pb2.StepPlan, expected: ExpectedStep, batch_rows: BatchRows, hidden_TE: torch.Tensor
    ) -> None:
        """Of a stage before the last: its part of the step is computed."""
        if len(hidden_TE):
            # A copy, for the next step is computed in the same memory.
            self._send(hidden_TE.clone(), [self._link.stage + 1], plan, _STREAM)
        if expected.said is not None:
            unsettled = _UnsettledStep(
                step=plan.step,
                rows_N=batch_rows.rows_N,
                places_N=_places(batch_rows),
                num_drafts_N=batch_rows.num_drafts_N,
                layout=_layout(plan, len(batch_rows.rows_S)),
                said=expected.said,
            )
            self._unsettled.append(unsettled)
            self._unsettled_step_R[unsettled.rows_N] = plan.step

    def tell(self, plan: step_pb2.StepPlan, batch_rows: BatchRows, said: StepTokens) -> None:
        """Of the last stage: tells the others what was sampled."""
        layout = _layout(plan, len(batch_rows.rows_S))
        if layout.size:
            message = layout.message(_places(batch_rows), said)
            self._send(message, range(self._link.num_stages - 1), plan, _SAID)

    def _settle(self, unsettled: _UnsettledStep) -> None:
        message, rows_N = unsettled.said.wait(), unsettled.rows_N
        if unsettled.num_drafts_N is not None:
            self._rows.settle_drafts(rows_N, unsettled.num_drafts_N)
        unsettled.layout.append(message, self._rows, rows_N, unsettled.places_N)
        self._unsettled_step_R[rows_N] = 0

    def _receive(self, into: torch.Tensor, stage: int, plan: step_pb2.StepPlan, channel: int) -> _Incoming:
        return _Incoming(into, self._link.receive(into, stage, step=plan.step, channel=channel))

    def _send(self, x: torch.Tensor, stages: Iterable[int], plan: step_pb2.StepPlan, channel: int) -> None:
        self._sent.append([self._link.send(x, stage, step=plan.step, channel=channel) for stage in stages])
        # Receivers begin when a plan comes to them. By now those of plans so long ago have, for their results are back.
        while len(self._sent) > self._max_steps_in_flight:
            for transfer in self._sent.popleft():
                transfer.wait()


def _named_rows(plan: step_pb2.StepPlan) -> np.ndarray:
    decode_rows = np.frombuffer(plan.decode_rows[: len(plan.decode_rows) // 2 * 2], "<u2")
    others = (*plan.rows, *plan.freed_rows, *plan.trimmed_rows, *plan.grown_rows)
    return np.concatenate((decode_rows, np.array(others, np.int64)))


def _layout(plan: step_pb2.StepPlan, num_rows: int) -> SampledTokens:
    num_drafts_S = np.zeros(num_rows, np.int64)
    if plan.num_drafts:
        num_drafts_S[-len(plan.num_drafts) :] = plan.num_drafts
    return SampledTokens(num_drafts_S)


def _places(batch_rows: BatchRows) -> np.ndarray:
    """Of the sampling rows among all of the step, which are distinct."""
    rows_S, rows_N = batch_rows.rows_S, batch_rows.rows_N
    order = np.argsort(rows_S)
    return order[np.searchsorted(rows_S, rows_N, sorter=order)]
