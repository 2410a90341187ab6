"""Defines a step by the few numbers that its cost depends on, and the interface of a cost model."""

from collections.abc import Sequence
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
    """A worker's rows without a model: follows plans and answers that every row sampled token 0.

    Its drafter proposes as many drafts as a plan asks for, each of them right with a given probability.

    Columns by row, as in `worker.step.rows`, so that a step with many rows costs little more than with one.
    """

    def __init__(self, max_num_seqs: int, *, acceptance: float = 0.0) -> None:
        """acceptance: the probability that a draft is right, if those before it are."""
        self._acceptance, self._random = acceptance, np.random.default_rng(0)
        self._sequence_R = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_R = np.zeros(max_num_seqs, np.int64)
        self._num_computed_R = np.zeros(max_num_seqs, np.int64)
        # Output index of the next token: a row knows num_prompt + position tokens.
        self._position_R = np.zeros(max_num_seqs, np.int32)
        self._tokens_R = np.zeros(max_num_seqs, np.int32)

    def apply(self, plan: Plan) -> tuple[StepShape, Result]:
        """Returns the shape of a plan's step and the workers' answer. Plans come in order."""
        drafts = dict(plan.drafts)
        for new in plan.new_rows:
            row = new.row
            self._sequence_R[row] = new.sequence
            self._num_prompt_R[row] = new.num_prompt_tokens
            self._num_computed_R[row] = new.num_computed_tokens
            self._position_R[row] = len(new.token_ids) - new.num_prompt_tokens
        sampling = decodes = plan.decode_rows.astype(np.intp)
        contexts = self._num_computed_R[decodes] + 1
        self._num_computed_R[decodes] = contexts
        num_prefill_tokens = chunk_context = pairs = 0
        ending: list[int] = []
        counts, token_ids = [1] * len(decodes), [_SAMPLED] * len(decodes)
        for row, count in plan.chunks:
            before = int(self._num_computed_R[row])
            self._num_computed_R[row] = context = before + count
            num_prefill_tokens += count
            chunk_context += context
            pairs += count * before + count * (count + 1) // 2
            num_drafts = len(drafts.get(row, ()))
            if context == self._num_prompt_R[row] + self._position_R[row] + num_drafts:
                ending.append(row)
                wrong = (self._random.random(num_drafts) >= self._acceptance).nonzero()[0]
                num_accepted = int(wrong[0]) if len(wrong) else num_drafts
                counts.append(1 + num_accepted)
                token_ids += [_DRAFT] * num_accepted + [_SAMPLED]
                # The KV of rejected drafts is void.
                self._num_computed_R[row] = context - num_drafts + num_accepted
        if ending:
            sampling = np.concatenate((decodes, ending))
        positions = self._position_R[sampling]
        self._position_R[sampling] = positions + (np.array(counts, np.int32) if drafts else 1)
        result = Result(
            step=plan.step,
            sequences=self._sequence_R[sampling],
            positions=positions,
            token_ids=np.array(token_ids, np.int32) if drafts else self._tokens_R[: len(sampling)],
            num_tokens=np.array(counts, np.int32) if drafts else None,
            drafts={int(self._sequence_R[row]): (_DRAFT,) * count for row, count in plan.wanted_drafts},
        )
        shape = StepShape(
            num_decodes=len(decodes),
            num_prefill_tokens=num_prefill_tokens,
            num_chunks=len(plan.chunks),
            num_sampled=len(sampling) + sum(map(len, drafts.values())),
            decode_context=int(contexts.sum()),
            chunk_context=chunk_context,
            attention_pairs=pairs,
            num_swapped_blocks=len(plan.swapped_out) + len(plan.swapped_in),
        )
        return shape, result
