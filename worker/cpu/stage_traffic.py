"""The exchange of a pipeline stage with the other stages in each step.

The residual stream goes from stage to stage. The last stage sends the sampled tokens to all earlier stages, whose rows
must hold the same tokens. An earlier stage appends them when a plan names such a row again. By then they have arrived
or are on their way, since a sequence is in at most one step in flight.

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
from worker.step.rows import Rows, decoding_rows, num_drafts_of

# Channels of a PipelineLink.
_STREAM, _SAMPLED = 0, 1


@dataclass(frozen=True, slots=True)
class _Incoming:
    tensor: torch.Tensor
    transfer: Transfer

    def wait(self) -> torch.Tensor:
        self.transfer.wait()
        return self.tensor


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The transfers on their way for one step; None: this stage gets none of that kind."""

    # The residual stream, float32 [T, E].
    stream: _Incoming | None
    # Sampled tokens in the layout of SampledTokens.
    sampled: _Incoming | None


class SampledTokens:
    """The message that carries a step's sampled tokens: int32 [2 S + drafts].

    It begins with the number of accepted drafts of each row, inverted (~) if its logits were not finite. Then each row
    in turn has room for its drafts and one more token. The entries of rows that do not sample are undefined.
    """

    def __init__(self, num_drafts_S: np.ndarray) -> None:
        """num_drafts_S: int64, the drafts of each scheduled row."""
        widths_S = num_drafts_S + 1
        self._num_rows, self._starts_S = len(widths_S), widths_S.cumsum() - widths_S
        self.size = self._num_rows + int(widths_S.sum())

    def message(self, places_N: np.ndarray, sampled: StepTokens) -> torch.Tensor:
        """Encodes what was sampled. places_N: indices of the sampling rows among the S."""
        message = np.zeros(self.size, np.int32)
        accepted_N = sampled.counts_N - 1
        message[places_N] = np.where(sampled.failed_N, ~accepted_N, accepted_N)
        tokens = message[self._num_rows :]
        for turn in range(sampled.tokens_ND1.shape[1]):
            says = np.flatnonzero(sampled.counts_N > turn)
            tokens[self._starts_S[places_N[says]] + turn] = sampled.tokens_ND1[says, turn]
        return torch.from_numpy(message)

    def append(self, message: torch.Tensor, rows: Rows, rows_N: np.ndarray, places_N: np.ndarray) -> None:
        """Appends the message's tokens to the rows, whose drafts are already settled."""
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
    """A computed step of an earlier stage whose sampled tokens are not yet in the rows."""

    step: int
    rows_N: np.ndarray
    places_N: np.ndarray
    num_drafts_N: np.ndarray | None
    layout: SampledTokens
    sampled: _Incoming


class StageTraffic:
    """One rank's exchange with other stages in one epoch. `expect` may be called on another thread than the rest."""

    def __init__(self, link: PipelineLink, rows: Rows, *, hidden_size: int, max_steps_in_flight: int) -> None:
        self._link, self._rows = link, rows
        self._hidden_size, self._max_steps_in_flight = hidden_size, max_steps_in_flight
        self.is_first, self.is_last = link.stage == 0, link.stage == link.num_stages - 1
        # Keeps sent tensors alive: gloo reads their memory until the receiver has it.
        self._sent: deque[list[Transfer]] = deque()
        self._unsettled: deque[_UnsettledStep] = deque()
        # The last step in which each row sampled and whose tokens are not in the rows yet; 0: none.
        self._unsettled_step_R = np.zeros(rows.max_num_seqs, np.int64)

    def expect(self, plan: step_pb2.StepPlan) -> ExpectedStep:
        """Begins to receive what the other stages will send for a step. Raises CollectiveError."""
        num_decodes, num_drafts = len(decoding_rows(plan)), num_drafts_of(plan)
        num_tokens, num_rows = num_decodes + num_drafts + sum(plan.num_tokens), num_decodes + len(plan.rows)
        stream = sampled = None
        if num_tokens > self._rows.max_num_batched_tokens or num_rows > self._rows.max_num_seqs:
            # Too large: `Rows.schedule` refuses it when its turn comes.
            return ExpectedStep(stream, sampled)
        if not self.is_first and num_tokens:
            stream = self._receive(torch.empty(num_tokens, self._hidden_size), self._link.stage - 1, plan, _STREAM)
        if not self.is_last and num_rows:
            size = 2 * num_rows + num_drafts
            sampled = self._receive(torch.empty(size, dtype=torch.int32), self._link.num_stages - 1, plan, _SAMPLED)
        return ExpectedStep(stream, sampled)

    def settle(self, plan: step_pb2.StepPlan) -> None:
        """Appends to the rows what earlier steps sampled, up to the last step with a row that the plan names. Waits for
        those tokens. Call it before the plan is applied. Raises CollectiveError."""
        if not self._unsettled:
            return
        named = _named_rows(plan)
        # Ignores rows that do not exist: `Rows.apply` or `schedule` raises PlanError for them.
        last = int(self._unsettled_step_R[named[named < len(self._unsettled_step_R)]].max(initial=0))
        while self._unsettled and self._unsettled[0].step <= last:
            self._settle(self._unsettled.popleft())

    def pass_on(
        self, plan: step_pb2.StepPlan, expected: ExpectedStep, batch_rows: BatchRows, hidden_TE: torch.Tensor
    ) -> None:
        """Sends the stream to the next stage, and remembers the step until its tokens arrive (all but the last
        stage)."""
        if len(hidden_TE):
            # A copy: the next step overwrites this memory.
            self._send(hidden_TE.clone(), [self._link.stage + 1], plan, _STREAM)
        if expected.sampled is not None:
            unsettled = _UnsettledStep(
                step=plan.step,
                rows_N=batch_rows.rows_N,
                places_N=_places(batch_rows),
                num_drafts_N=batch_rows.num_drafts_N,
                layout=_layout(plan, len(batch_rows.rows_S)),
                sampled=expected.sampled,
            )
            self._unsettled.append(unsettled)
            self._unsettled_step_R[unsettled.rows_N] = plan.step

    def tell(self, plan: step_pb2.StepPlan, batch_rows: BatchRows, sampled: StepTokens) -> None:
        """Sends what was sampled to all other stages (last stage only)."""
        layout = _layout(plan, len(batch_rows.rows_S))
        if layout.size:
            message = layout.message(_places(batch_rows), sampled)
            self._send(message, range(self._link.num_stages - 1), plan, _SAMPLED)

    def _settle(self, unsettled: _UnsettledStep) -> None:
        message, rows_N = unsettled.sampled.wait(), unsettled.rows_N
        if unsettled.num_drafts_N is not None:
            self._rows.settle_drafts(rows_N, unsettled.num_drafts_N)
        unsettled.layout.append(message, self._rows, rows_N, unsettled.places_N)
        self._unsettled_step_R[rows_N] = 0

    def _receive(self, into: torch.Tensor, stage: int, plan: step_pb2.StepPlan, channel: int) -> _Incoming:
        return _Incoming(into, self._link.receive(into, stage, step=plan.step, channel=channel))

    def _send(self, x: torch.Tensor, stages: Iterable[int], plan: step_pb2.StepPlan, channel: int) -> None:
        self._sent.append([self._link.send(x, stage, step=plan.step, channel=channel) for stage in stages])
        # A receiver begins when it gets the plan. Steps older than this have returned results, so these sends end soon.
        while len(self._sent) > self._max_steps_in_flight:
            for transfer in self._sent.popleft():
                transfer.wait()


def _named_rows(plan: step_pb2.StepPlan) -> np.ndarray:
    others = (*plan.rows, *plan.freed_rows, *plan.trimmed_rows, *plan.grown_rows)
    return np.concatenate((decoding_rows(plan), np.array(others, np.int64)))


def _layout(plan: step_pb2.StepPlan, num_rows: int) -> SampledTokens:
    num_drafts_S = np.zeros(num_rows, np.int64)
    if plan.rows_with_drafts:
        first = len(plan.decode_rows) // 2
        counts = np.frombuffer(plan.num_drafts, "<i4")
        num_drafts_S[first : first + len(counts)] = counts
    return SampledTokens(num_drafts_S)


def _places(batch_rows: BatchRows) -> np.ndarray:
    """Returns the indices of the sampling rows among all rows of the step, which are distinct."""
    rows_S, rows_N = batch_rows.rows_S, batch_rows.rows_N
    order = np.argsort(rows_S)
    return order[np.searchsorted(rows_S, rows_N, sorter=order)]
