"""What a step's sampling rows said, as the columns of a StepResult.

Shape suffixes: N sampling rows of the step, D drafts of the longest row.
"""

import numpy as np

from protos import step_pb2


def put_columns(
    result: step_pb2.StepResult,
    sequences_N: np.ndarray,
    positions_N: np.ndarray,
    tokens_ND1: np.ndarray,
    counts_N: np.ndarray | None,
    failed_N: np.ndarray,
) -> None:
    """Row i said tokens_ND1[i, : counts_N[i]], the first of them at output position positions_N[i]; counts_N is None
    where no row has drafts: one each. Of rows that failed only the sequence is told. Integers of any width."""
    good_N = ~failed_N
    result.sequences = sequences_N[good_N].astype("<i8").tobytes()
    result.positions = positions_N[good_N].astype("<i4").tobytes()
    if counts_N is None:
        result.token_ids = tokens_ND1[good_N, 0].astype("<i4").tobytes()
    else:
        result.num_tokens = counts_N[good_N].astype("<i4").tobytes()
        # Row by row, of each what it said.
        is_said = (np.arange(tokens_ND1.shape[1]) < counts_N[:, None]) & good_N[:, None]
        result.token_ids = tokens_ND1[is_said].astype("<i4").tobytes()
    result.failed_sequences.extend(sequences_N[failed_N].tolist())
