"""The outcomes of constraints, by their digests: canonical forms, and why others were refused."""

import math
import time
from collections import OrderedDict
from dataclasses import dataclass

from protos.inference_pb2 import Constraint

# Constraints that are remembered, at most, and the bytes of what is known of them.
_MOST, _MOST_BYTES = 4096, 2**25
# What an outcome takes besides its text.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Refusal:
    problem: str
    # The field of the constraint that is wrong; empty: the constraint itself.
    kind: str
    # By time.monotonic(). The machine may have been busy: then it does not hold for good.
    until: float = math.inf


Outcome = Constraint | Refusal


class Outcomes:
    """The one that has not been asked for longest goes first."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Outcome] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: bytes) -> Outcome | None:
        found = self._found.get(digest)
        if isinstance(found, Refusal) and time.monotonic() >= found.until:
            self._drop(digest)
            return None
        if found is not None:
            self._found.move_to_end(digest)
        return found

    def put(self, digest: bytes, outcome: Outcome) -> None:
        if digest in self._found:
            return
        self._found[digest] = outcome
        self._num_bytes += _size(outcome)
        while len(self._found) > _MOST or self._num_bytes > _MOST_BYTES:
            self._drop(next(iter(self._found)))

    def _drop(self, digest: bytes) -> None:
        self._num_bytes -= _size(self._found.pop(digest))


def _size(outcome: Outcome) -> int:
    text = outcome.ByteSize() if isinstance(outcome, Constraint) else len(outcome.problem)
    return text + _ENTRY_BYTES
