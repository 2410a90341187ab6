"""Defines a step by the few numbers that its cost depends on, and the interface of a cost model."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.core.messages import Plan, Result


@dataclass(slots=True)
class StepShape:
    """The composition of one step, or the sum over several."""

    # Rows that compute one token and sample the next.
    num_decodes: int
    # Tokens of all other rows, and the number of those rows.
    num_prefill_tokens: int
    num_chunks: int
    # Rows that sample: the decodes, and the chunks that reach the last known token.
    num_sampled: int
    # Tokens whose KV the decodes read, their own included.
    decode_context: int
    # The same for the chunks, each row counted once.
    chunk_context: int
    # (query, key) pairs that the chunks' attention multiplies.
    attention_pairs: int
    # KV blocks copied between device and host.
    num_swapped_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


class CostModel(Protocol):
    """Predicts the seconds of a step from its shape. Two kinds: `fitted` to measured steps, and `roofline`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a step's time, for people."""
        ...

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline. A step passes them one after another; each can work on a different step."""
        ...

    @property
    def host_seconds(self) -> float:
        """Scheduler time around a step. Meanwhile the device works only on other steps in flight."""
        ...

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        """Seconds that each part takes on one stage of the pipeline."""
        ...


# The token that rows sample where no draft is right, and the one that their drafter proposes.
_SAMPLED, _DRAFT = 0, 1


class PaperRows:
    """A worker's rows without a model: follows plans and answers that every row sampled token 0, or the next token of
    an output that is known.

    Its drafter proposes as many drafts as a plan asks for. Drafts of the workers' drafter are right with a given
    probability; drafts of the core's drafters are compared with known outputs.

    Columns by row, as in `worker.step.rows`, so that a step with many rows costs little more than with one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        acceptance: float | None = 0.0,
        output_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """acceptance: the probability that a draft is right, if those before it are; None: drafts are compared with the
        output. output_of: returns the whole output of a sequence that takes a row; None: outputs are not known."""
        assert acceptance is not None or output_of is not None
        self._acceptance, self._random = acceptance, np.random.default_rng(0)
        self._output_of = output_of
        self._outputs_R: list[Sequence[int]] = [()] * max_num_seqs
        self._sequence_R = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_R = np.zeros(max_num_seqs, np.int64)
        self._num_computed_R = np.zeros(max_num_seqs, np.int64)
        # Output index of the next token: a row knows num_prompt + position tokens.
        self._position_R = np.zeros(max_num_seqs, np.int32)
        self._tokens_R = np.zeros(max_num_seqs, np.int32)

    def apply(self, plan: Plan) -> tuple[StepShape, Result]:
        """Returns the shape of a plan's step and the workers' answer. Plans come in order."""
        for new in plan.new_rows:
            row = new.row
            self._sequence_R[row] = new.sequence
            self._num_prompt_R[row] = new.num_prompt_tokens
            self._num_computed_R[row] = new.num_computed_tokens
            self._position_R[row] = len(new.token_ids) - new.num_prompt_tokens
            if self._output_of is not None:
                self._outputs_R[row] = self._output_of(new.sequence)
        sampling = decodes = plan.decode_rows.astype(np.intp)
        contexts = self._num_computed_R[decodes] + 1
        self._num_computed_R[decodes] = contexts
        num_prefill_tokens = chunk_context = pairs = 0
        others: list[int] = []
        counts = [1] * len(decodes)
        num_tokens = [(row, 1 + len(token_ids), token_ids) for row, token_ids in plan.drafts]
        num_tokens += [(row, count, ()) for row, count in plan.chunks]
        for row, count, proposed in num_tokens:
            before = int(self._num_computed_R[row])
            self._num_computed_R[row] = context = before + count
            num_prefill_tokens += count
            chunk_context += context
            pairs += count * before + count * (count + 1) // 2
            if context == self._num_prompt_R[row] + self._position_R[row] + len(proposed):
                others.append(row)
                num_accepted = self._num_accepted(row, proposed)
                counts.append(1 + num_accepted)
                # The KV of rejected drafts is void.
                self._num_computed_R[row] = context - len(proposed) + num_accepted
        if others:
            sampling = np.concatenate((decodes, others))
        drafts = plan.has_drafts
        positions = self._position_R[sampling]
        self._position_R[sampling] = positions + (np.array(counts, np.int32) if drafts else 1)
        result = Result(
            step=plan.step,
            sequences=self._sequence_R[sampling],
            positions=positions,
            token_ids=self._token_ids(sampling, positions, counts if drafts else None),
            num_tokens=np.array(counts, np.int32) if drafts else None,
            drafts={int(self._sequence_R[row]): (_DRAFT,) * count for row, count in plan.wanted_drafts},
        )
        shape = StepShape(
            num_decodes=len(decodes),
            num_prefill_tokens=num_prefill_tokens,
            num_chunks=len(num_tokens),
            num_sampled=len(sampling) + len(plan.draft_token_ids),
            decode_context=int(contexts.sum()),
            chunk_context=chunk_context,
            attention_pairs=pairs,
            num_swapped_blocks=len(plan.swapped_out) + len(plan.swapped_in),
        )
        return shape, result

    def _num_accepted(self, row: int, proposed: Sequence[int]) -> int:
        if not proposed:
            return 0
        if self._acceptance is None:
            # The last token of an output is sampled, never a draft: nothing comes after it.
            rest = self._outputs_R[row][int(self._position_R[row]) : -1]
            right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(proposed, rest, strict=False))
            return sum(1 for _ in right)
        wrong = (self._random.random(len(proposed)) >= self._acceptance).nonzero()[0]
        return int(wrong[0]) if len(wrong) else len(proposed)

    def _token_ids(self, sampling: np.ndarray, positions: np.ndarray, counts: Sequence[int] | None) -> np.ndarray:
        """Tokens of the sampling rows; counts: how many each has; None: one each."""
        if self._output_of is None:
            if counts is None:
                return self._tokens_R[: len(sampling)]
            return np.array([token for n in counts for token in ([_DRAFT] * (n - 1) + [_SAMPLED])], np.int32)
        token_ids: list[int] = []
        for row, position, count in zip(
            sampling.tolist(), positions.tolist(), counts or itertools.repeat(1), strict=False
        ):
            known = self._outputs_R[row][position : position + count]
            # A workers' draft may be taken for right behind the end, where the core cuts it off.
            token_ids += [*known, *[_SAMPLED] * (count - len(known))]
        return np.array(token_ids, np.int32)
