"""A step's batch in terms of rows.

Shape suffixes: S scheduled rows, N those of them that sample.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Row rows_S[i] computes its next num_tokens_S[i] tokens; the last num_drafts_S[i] are drafts. int64 [S]."""

    rows_S: np.ndarray
    num_tokens_S: np.ndarray
    # None: no row has drafts.
    num_drafts_S: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Whose the entries of a batch are, and which of these sample, in its order. int64."""

    rows_S: np.ndarray
    rows_N: np.ndarray
    # int64 [N]. None: no row has drafts.
    num_drafts_N: np.ndarray | None = None
    # Whether the batch was begun by worker.decodes.
    all_decode: bool = False
