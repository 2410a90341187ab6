"""Which settings are probed: those whose steps tell the most about all others."""

from collections.abc import Sequence
from typing import Any

from octavo.tune.space import OFF, Candidate


def to_probe(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Settings to probe, the largest first. The steps of one with drafts tell little: it is probed without."""
    plain = [
        each if dict(each.values).get("speculative_config", OFF) == OFF else _without_drafts(each)
        for each in candidates
    ]
    return sorted(dict.fromkeys(plain), key=size_of, reverse=True)


def _without_drafts(candidate: Candidate) -> Candidate:
    return Candidate(tuple((name, OFF if name == "speculative_config" else value) for name, value in candidate.values))


def size_of(candidate: Candidate) -> tuple[Any, Any]:
    values = dict(candidate.values)
    return values.get("max_num_batched_tokens", 0), values.get("max_num_seqs", 0)
