"""A step's batch in terms of rows.

Shape suffixes: S scheduled rows.
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
