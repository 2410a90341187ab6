"""Which tokens of a step are followed by a choice.

Shape suffixes: S rows of the batch, T tokens, N sampling rows, L scored positions (a row's last token before its
drafts, and each draft), D drafts of the longest row.
"""

from dataclasses import dataclass

import numpy as np

from worker.gpu.step_inputs import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDrafts:
    """int32."""

    starts_N: np.ndarray  # a row's first position among L
    counts_N: np.ndarray
    drafts_ND: np.ndarray  # -1 where a row has fewer
    drafts_LD: np.ndarray  # those before each position; -1 where there are fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPositions:
    rows_N: np.ndarray  # int32
    rows_L: np.ndarray  # int32
    output_positions_L: np.ndarray  # int32, of the token that is chosen
    tokens_L: np.ndarray  # int64, indices into T
    drafts: RowDrafts | None = None

    @classmethod
    def of(cls, inputs: StepInputs) -> "ScoredPositions":
        rows_N = inputs.rows_S[inputs.sampling_N]
        last_N = inputs.query_starts[1:][inputs.sampling_N].astype(np.int64) - 1
        if inputs.num_drafts_N is None:
            return cls(
                rows_N=rows_N, rows_L=rows_N, output_positions_L=inputs.output_positions_N, tokens_L=last_N
            )  # fmt: skip
        counts_N = inputs.num_drafts_N.astype(np.int64)
        num_drafts = int(counts_N.max(initial=0))
        row_L = np.arange(len(rows_N)).repeat(counts_N + 1)
        starts_N = (counts_N + 1).cumsum() - (counts_N + 1)
        turn_L = np.arange(len(row_L)) - starts_N[row_L]
        turns_D = np.arange(num_drafts)
        is_draft_ND = turns_D < counts_N[:, None]
        places_ND = (last_N - counts_N + 1)[:, None] + turns_D
        drafts_ND = np.where(is_draft_ND, inputs.token_ids_T[np.where(is_draft_ND, places_ND, 0)], np.int32(-1))
        return cls(
            rows_N=rows_N,
            rows_L=rows_N[row_L],
            output_positions_L=(inputs.output_positions_N[row_L] + turn_L).astype(np.int32),
            tokens_L=(last_N - counts_N)[row_L] + turn_L,
            drafts=RowDrafts(
                starts_N=starts_N.astype(np.int32),
                counts_N=counts_N.astype(np.int32),
                drafts_ND=drafts_ND,
                drafts_LD=np.where(turns_D < turn_L[:, None], drafts_ND[row_L], np.int32(-1)),
            ),
        )
