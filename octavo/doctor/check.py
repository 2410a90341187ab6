"""One line of `octavo doctor`: a subject, its state, what was found, and what to do."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a subject is. OK: nothing to do. NOTE: a cluster runs, but could run better. PROBLEM: a cluster with these
    options does not start, fails later, or is several times slower than it should be."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A result. advice: what to do; empty exactly if the state is OK."""

    subject: str
    state: State
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.state is State.OK) == (not self.advice), self


def ok(subject: str, found: str) -> Check:
    return Check(subject=subject, state=State.OK, found=found)


def note(subject: str, found: str, advice: str) -> Check:
    return Check(subject=subject, state=State.NOTE, found=found, advice=advice)


def problem(subject: str, found: str, advice: str) -> Check:
    return Check(subject=subject, state=State.PROBLEM, found=found, advice=advice)


def gib(num_bytes: float) -> str:
    """Formats bytes, as "1.5 GiB" or "12 MiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
