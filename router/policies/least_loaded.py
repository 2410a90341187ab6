"""The replica with the least to do."""

from collections.abc import Sequence

from router.policies.base import ReplicaLoad


class LeastLoaded:
    """Fewest sequences running or waiting, then fewest queued prompt tokens; equals take turns.

    A replica whose workers are away comes last, however little it has to do.
    """

    name = "least_loaded"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad]) -> tuple[int, str]:
        keys = [(not load.workers_ready, load.num_sequences, load.num_queued_tokens) for load in loads]
        least = min(keys)
        equals = [i for i, key in enumerate(keys) if key == least]
        if len(loads) == 1:
            return 0, "only"
        if len(equals) == 1:
            return equals[0], "least"
        self._turn += 1
        return equals[self._turn % len(equals)], "tie"
