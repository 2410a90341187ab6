"""How much a client may add to an overload by trying again."""

import threading


class RetryBudget:
    """Of one client, all of whose threads and requests share it.

    Every request pays in a fifth of a retry, and every retry of what a server refused for its load takes a whole one
    (unless the client holds tokens of it): so retries add a fifth to what a client asks for, however busy servers are.
    A reserve lets one that has asked for little try again, too. After Finagle's RetryBudget (Twitter) and gRPC's retry
    throttling (proposal A6).
    """

    def __init__(self, *, per_request: float = 0.2, reserve: int = 10) -> None:
        """reserve: retries that are there at first, and the most that are ever saved up."""
        self._per_request, self._reserve = per_request, reserve
        self._level = float(reserve)
        self._lock = threading.Lock()

    def note_request(self) -> None:
        with self._lock:
            self._level = min(self._level + self._per_request, self._reserve)

    def take(self) -> bool:
        """A retry; False if there is none left."""
        with self._lock:
            if self._level < 1:
                return False
            self._level -= 1
            return True
