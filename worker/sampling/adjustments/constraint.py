"""constraint: only tokens with which the output can still become what its constraint asks for.
thinking_token_budget: once it is spent, only the tokens that end the reasoning.

A row's matcher is made from both and the output tokens that the row comes with. It computes on the threads of
`worker.sampling.grammars`, one job at a time; between two jobs it belongs to the thread that computes steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from kernels.sampling import keep_bits
from worker.device.staging import Part, StepSlot
from worker.sampling.feature import Adjustment, NewRow, Positions, Staged, Table
from worker.sampling.grammars import Grammars

if TYPE_CHECKING:
    # Not imported at run time: code for GPUs must also run without protobuf.
    from protos.inference_pb2 import SamplingParams
    from runtime.grammar.engine import Matcher

Job = Callable[[], None]


class ConstrainedRow(Adjustment):
    fields = ("constraint", "reasoning_marks")

    def __init__(
        self,
        grammars: Grammars | None,
        sampling: "SamplingParams",
        output: Sequence[int],
        *,
        vocab_size: int,
        end_token_ids: frozenset[int],
    ) -> None:
        """grammars: None if this worker has no engine. output: the tokens that the row comes with. end_token_ids: after
        one of these nothing is masked, since what comes then is dropped."""
        self._grammars, self._sampling, self._output = grammars, sampling, output
        self._has_constraint = sampling.HasField("constraint")
        self._num_words, self._end_token_ids = -(-vocab_size // 32), end_token_ids
        # Output tokens so far, and the last of them, which no job has seen.
        self.num_output_tokens = len(output)
        self._untaken: list[int] = []
        # After an end token.
        self.is_over = False
        self._job: Future[None] | None = None
        # The drafts of the last job of `masking`, and the tokens appended since it was made; None: there was none.
        self._drafts: tuple[int, ...] | None = None
        self._since: list[int] = []
        # --- Written by jobs.
        self._matcher: Matcher | None = None
        # Tokens that the matcher has taken before they come: nothing else may.
        self._ahead: list[int] = []
        # Masks before the drafts and after each of them, as far as the grammar allows them; None: any token may come.
        # The last mask is empty, and `_error` says why, if the matcher can't go on there.
        self._masks: list[np.ndarray | None] = []
        self._error = ""

    @classmethod
    def add(cls, new: NewRow) -> Self | None:
        return cls(
            new.grammars,
            new.sampling,
            new.output.tolist(),
            vocab_size=new.vocab_size,
            end_token_ids=frozenset(new.sampling.stop_token_ids)
            | (frozenset() if new.sampling.ignore_eos else new.eos_token_ids),
        )

    # --- On the thread that computes steps

    @property
    def name(self) -> str:
        """The rule that limits the tokens, for errors."""
        return "the constraint" if self._has_constraint else "thinking_token_budget"

    @property
    def is_light(self) -> bool:
        """True if its jobs take microseconds, less than to hand them to a thread: only a budget, known already."""
        if self._has_constraint:
            return False
        self._wait()
        return self._matcher is not None

    def masking(self, drafts: Sequence[int] = (), *, most: int = 0) -> Job | None:
        """Returns the job that computes the masks of the next position and of those after drafts, to be started; None:
        one has been made, or the output is over. Up to `most` tokens that must follow are found with them.

        Does not wait for a job under way unless it computes other masks.
        """
        wanted = tuple(drafts)
        if self.is_over or self._covers(wanted):
            return None
        self._wait()
        self._drafts, self._since = wanted, []
        return lambda: self._mask(wanted, most)

    def forcing(self, most: int) -> Job | None:
        """Returns the job that finds up to `most` tokens for `forced`; None: some are known, or the output is over."""
        return None if self.is_over or self.forced else lambda: self._force(most)

    def attach(self, job: Future[None]) -> None:
        """Notes that the row's job has been started."""
        self._job = job

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next, as far as jobs have found them."""
        self._wait()
        count = len(self._untaken)
        return self._ahead[count:] if self._ahead[:count] == self._untaken else []

    def mask(self, position: int) -> np.ndarray | None:
        """Returns the mask, int32 [W], of an output position: the next one, or one after drafts. None: any token may
        come, or will do, since it is going to be dropped."""
        return self.masks(position - self.num_output_tokens + 1)[-1]

    def masks(self, count: int) -> list[np.ndarray | None]:
        """Returns the masks, as `mask` does, of the next position and of those after count - 1 drafts."""
        if self.is_over:
            return [None] * count
        self._wait()
        if not self._covers(()) or len(self._since) >= len(self._masks):
            self._drafts, self._since = (), []
            self._mask((), 0)
        found = self._masks[len(self._since) : len(self._since) + count]
        return [*found, *[None] * (count - len(found))]

    def apply(self, logits_V: np.ndarray) -> None:
        mask_W = self.mask(self.num_output_tokens)
        if mask_W is not None:
            keep_bits(logits_V, mask_W)

    def apply_behind(self, drafts: Sequence[int], logits_V: np.ndarray) -> None:
        """Masks the logits of the position behind drafts, all of which the grammar allows and none of which ends the
        output."""
        job = self.masking(drafts)
        if job is not None:
            job()
        mask_W = self.masks(1 + len(drafts))[-1]
        if mask_W is not None:
            keep_bits(logits_V, mask_W)

    def append(self, token_id: int) -> None:
        self._wait()
        self.num_output_tokens += 1
        self._untaken.append(token_id)
        self._since.append(token_id)
        self.is_over = self.is_over or token_id in self._end_token_ids

    def num_left(self, position: int) -> int | None:
        """Returns how many tokens the mask of an output position leaves; None: all."""
        mask_W = self.mask(position)
        return None if mask_W is None else int(np.bitwise_count(mask_W.view(np.uint32)).sum())

    @property
    def error(self) -> str:
        """Why the matcher can't go on where it leaves no token; empty: the grammar allows none."""
        self._wait()
        return self._error

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()
            self._job = None

    def _covers(self, drafts: tuple[int, ...]) -> bool:
        """Returns True if the last job of `masking` computes the next position's mask and those after drafts."""
        if self._drafts is None:
            return False
        turn = len(self._since)
        return tuple(self._since) == self._drafts[:turn] and self._drafts[turn : turn + len(drafts)] == drafts

    # --- Jobs. They keep their errors, which are this row's alone.

    def _mask(self, drafts: tuple[int, ...], most: int) -> None:
        self._masks, self._error = [], ""
        try:
            for mask_W in self._masks_after(drafts, most):
                self._masks.append(mask_W)
        except Exception as error:  # noqa: BLE001 - whatever it is, other rows go on
            self._masks.append(np.zeros(self._num_words, np.int32))
            self._error = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    def _masks_after(self, drafts: tuple[int, ...], most: int) -> Iterator[np.ndarray | None]:
        matcher = self._caught_up()
        others = drafts[len(self._ahead) :]
        for index, token in enumerate(self._ahead):
            yield self._only(token)
            if drafts[index : index + 1] != (token,) or token in self._end_token_ids:
                return
        mask_W, is_narrow = self._filled(matcher)
        yield mask_W
        if not others:
            if is_narrow:
                self._go_ahead(matcher, most)
            return
        matcher = matcher.copy()
        for draft in others:
            if draft in self._end_token_ids or not matcher.take(draft):
                return
            yield self._filled(matcher)[0]

    def _force(self, most: int) -> None:
        # The mask of the next position says what is wrong.
        with contextlib.suppress(Exception):
            self._go_ahead(self._caught_up(), most)

    def _go_ahead(self, matcher: "Matcher", most: int) -> None:
        """Takes the tokens that must come next."""
        for token in matcher.forced_tokens(most):
            if not matcher.take(token):
                return
            self._ahead.append(token)

    def _caught_up(self) -> "Matcher":
        """Returns the matcher after all output tokens, and those ahead."""
        if self._matcher is None:
            if self._grammars is None:
                raise ValueError("this worker has no grammar engine")
            self._matcher = self._grammars.matcher(self._sampling, self._output)
            self._output = ()
        while self._untaken:
            token = self._untaken[0]
            if not (self._ahead[0] == token if self._ahead else self._matcher.take(token)):
                position = self.num_output_tokens - len(self._untaken)
                reason = self._matcher.error or "the constraint does not allow it"
                raise ValueError(f"the output has token {token} at position {position}: {reason}")
            del self._untaken[0], self._ahead[:1]
        return self._matcher

    def _filled(self, matcher: "Matcher") -> tuple[np.ndarray | None, bool]:
        """Returns the mask, and `Matcher.fill_mask`'s result."""
        if matcher.is_free:
            return None, False
        mask_W = np.empty(self._num_words, np.int32)
        is_narrow = matcher.fill_mask(mask_W)
        if is_narrow and matcher.error:
            raise ValueError(matcher.error)
        return mask_W, is_narrow

    def _only(self, token: int) -> np.ndarray:
        mask_W = np.zeros(self._num_words, np.uint32)
        mask_W[token // 32] = 1 << token % 32
        return mask_W.view(np.int32)


class ConstraintTable(Table[ConstrainedRow]):
    """Keeps matchers on the host and sends a mask with each position; nothing is kept on the device."""

    def __init__(self, device: torch.device, *, num_rows: int, **sizes: Any) -> None:
        super().__init__(device, num_rows=num_rows, **sizes)
        self._constrained: dict[int, ConstrainedRow] = {}

    def stage_rows(self, new: Sequence[tuple[int, ConstrainedRow]], slot: StepSlot) -> Sequence[Part]:
        self._constrained.update(new)
        return ()

    def free(self, row: int) -> None:
        super().free(row)
        self._constrained.pop(row, None)

    def write(self, staged: Staged) -> None:
        return

    def stage(self, at: Positions, slot: StepSlot) -> Sequence[Part]:
        masks: list[np.ndarray] = []
        places_A = np.full(len(at.rows_A), -1, np.int32)
        for index in np.flatnonzero(self.needed(at.rows_A, at.positions_A)).tolist():
            mask_W = self._constrained[int(at.rows_A[index])].mask(int(at.positions_A[index]))
            if mask_W is not None:
                places_A[index] = len(masks)
                masks.append(mask_W)
        return (slot.add(places_A), slot.add(np.stack(masks))) if masks else ()

    def apply(self, logits_AV: torch.Tensor, positions_A: torch.Tensor, staged: Sequence[Part]) -> None:
        places, masks = staged
        self.kernels.apply_bitmask(logits_AV, places.tensor, masks.tensor)
