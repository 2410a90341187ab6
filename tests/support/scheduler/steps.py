"""The columns of step messages as lists."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos import step_pb2


@dataclass(frozen=True, slots=True)
class Said:
    """A StepResult's columns."""

    sequences: list[int]
    positions: list[int]
    num_tokens: list[int]
    token_ids: list[int]


def said(result: step_pb2.StepResult) -> Said:
    return Said(
        np.frombuffer(result.sequences, "<i8").tolist(),
        np.frombuffer(result.positions, "<i4").tolist(),
        np.frombuffer(result.num_tokens, "<i4").tolist(),
        np.frombuffer(result.token_ids, "<i4").tolist(),
    )


def result_columns(sequences: Iterable[int], positions: Iterable[int], token_ids: Iterable[int]) -> dict[str, Any]:
    """Fields of a StepResult with one token per sequence."""
    return {
        "sequences": np.array(list(sequences), "<i8").tobytes(),
        "positions": np.array(list(positions), "<i4").tobytes(),
        "token_ids": np.array(list(token_ids), "<i4").tobytes(),
    }


def drafting(drafts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Fields of a StepPlan: rows with drafts, and these."""
    return {
        "rows_with_drafts": decodes(*drafts),
        "num_drafts": np.array([len(each) for each in drafts.values()], "<i4").tobytes(),
        "draft_token_ids": np.array([token for each in drafts.values() for token in each], "<i4").tobytes(),
    }


def decodes(*rows: int) -> bytes:
    """StepPlan.decode_rows."""
    return np.array(rows, "<u2").tobytes()
