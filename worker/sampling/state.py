"""The sampling state of all rows, kept on the CPU."""

from collections.abc import Sequence

import numpy as np

from protos import inference_pb2
from worker.sampling.adjustments.constraint import ConstrainedRow
from worker.sampling.feature import Adjustment, NewRow
from worker.sampling.features import RowSampling, resolve_sampling
from worker.sampling.filters import Filters
from worker.sampling.grammars import Grammars

# `logprobs` of a row that asked for none.
NO_LOGPROBS = -1


class SamplingState:
    """Sampling parameters of all rows. Entries of free rows are undefined."""

    def __init__(
        self, *, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int], grammars: Grammars | None = None
    ) -> None:
        self._vocab_size, self.grammars = vocab_size, grammars
        self.eos_token_ids = eos_token_ids
        self.filters = Filters(num_rows)
        self.logprobs_R = np.full(num_rows, NO_LOGPROBS, np.int64)
        self.prompt_logprobs_R = np.full(num_rows, NO_LOGPROBS, np.int64)
        # By row: tokens whose logprobs come in the place of the most likely ones.
        self.listed: dict[int, np.ndarray] = {}
        self._adjustments: list[tuple[Adjustment, ...]] = [()] * num_rows
        # Rows with adjustments.
        self.adjusts_R = np.zeros(num_rows, np.bool_)
        # Rows with a constraint; mostly none.
        self.constrained: dict[int, ConstrainedRow] = {}
        # Rows that are more than merely greedy, with a constraint or without, and rows that want prompt logprobs:
        # mostly empty, so most steps need only a quick check.
        self._demanding_rows: set[int] = set()
        self._scoring_rows: set[int] = set()

    def set(
        self, row: int, sampling: inference_pb2.SamplingParams, choice: int, prompt: np.ndarray, output: np.ndarray
    ) -> RowSampling:
        """Stores a new row's parameters, and returns them resolved; prompt and output are the tokens it comes with.

        Raises PlanError, naming the field, for a value that is missing or out of range.
        """
        new = NewRow(
            sampling=sampling,
            prompt=prompt,
            output=output,
            vocab_size=self._vocab_size,
            eos_token_ids=self.eos_token_ids,
            grammars=self.grammars,
        )
        resolved = resolve_sampling(row, choice, new)
        scores_prompt = sampling.HasField("prompt_logprobs")
        self.filters.add(resolved)
        self.logprobs_R[row] = NO_LOGPROBS if resolved.num_logprobs is None else resolved.num_logprobs
        self.prompt_logprobs_R[row] = sampling.prompt_logprobs if scores_prompt else NO_LOGPROBS
        if resolved.listed is not None:
            self.listed[row] = resolved.listed
        self._adjustments[row] = resolved.adjustments
        self.adjusts_R[row] = bool(resolved.adjustments)
        for each in resolved.adjustments:
            if isinstance(each, ConstrainedRow):
                self.constrained[row] = each
        others = len(resolved.adjustments) - (row in self.constrained)
        if resolved.temperature > 0 or others or resolved.num_logprobs is not None:
            self._demanding_rows.add(row)
        if scores_prompt:
            self._scoring_rows.add(row)
        return resolved

    def needs_logits(self, rows_N: np.ndarray) -> bool:
        """Returns True if one of these rows is more than merely greedy, whether it has a constraint or not."""
        return bool(self._demanding_rows) and not self._demanding_rows.isdisjoint(rows_N.tolist())

    def is_only_constrained(self, row: int) -> bool:
        """Returns True if a constraint is the row's only adjustment."""
        return row in self.constrained and len(self._adjustments[row]) == 1

    def constrains(self, rows_N: np.ndarray) -> bool:
        """Returns True if one of these rows has a constraint."""
        return bool(self.constrained) and not self.constrained.keys().isdisjoint(rows_N.tolist())

    @property
    def scores_prompts(self) -> bool:
        """True if a row wants prompt logprobs."""
        return bool(self._scoring_rows)

    def clear(self, row: int) -> None:
        """Frees the memory of the row's adjustments, and removes the row from the sets."""
        self._adjustments[row] = ()
        self.adjusts_R[row] = False
        self.constrained.pop(row, None)
        self.listed.pop(row, None)
        self._demanding_rows.discard(row)
        self._scoring_rows.discard(row)

    def append(self, row: int, token_id: int) -> None:
        """Counts a token that the row sampled."""
        for each in self._adjustments[row]:
            each.append(token_id)

    def append_all(self, rows_N: np.ndarray, token_ids_N: np.ndarray) -> None:
        """Counts a token of each row that has adjustments."""
        for index in np.flatnonzero(self.adjusts_R[rows_N]).tolist():
            self.append(int(rows_N[index]), int(token_ids_N[index]))

    def adjust(self, row: int, logits_V: np.ndarray) -> None:
        """Changes the row's float32 logits in place."""
        for each in self._adjustments[row]:
            each.apply(logits_V)

    def adjust_behind(self, row: int, drafts: Sequence[int], logits_V: np.ndarray) -> None:
        """Changes the row's float32 logits in place, at the position behind drafts that may come next. The drafts count
        for its constraint, and not for penalties."""
        for each in self._adjustments[row]:
            if isinstance(each, ConstrainedRow):
                each.apply_behind(drafts, logits_V)
            else:
                each.apply(logits_V)

    def why_no_token(self, row: int, position: int) -> str:
        """Returns why no token is left to a row at an output position, as a message for its client. Its logits were
        finite."""
        bans = [f"sampling.{each.bans}" for each in self._adjustments[row] if each.bans]
        constrained, at = self.constrained.get(row), f"no token is left at output position {position}"
        num_left = None if constrained is None else constrained.num_left(position)
        if constrained is None or num_left is None:
            return f"{at}: {', '.join(bans)} ban all" if bans else ""
        if not num_left:
            return f"{at}: {constrained.error or f'{constrained.name} leaves none'}"
        if not bans:
            return ""
        return f"{at}: {constrained.name} leaves {num_left}, and {', '.join(bans)} ban{'s' * (len(bans) == 1)} them"
