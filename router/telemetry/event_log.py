"""The latest events at this router, for people who watch it: replicas come and go, streams move, requests end."""

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

_MOST = 512
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEvent:
    """number: counts from 1. at: seconds since 1970. request_id, tenant: of the request concerned; empty: none."""

    number: int
    at: float
    kind: str
    text: str
    replica: str = ""
    request_id: str = ""
    tenant: str = ""


class EventLog:
    """Keeps the latest 512. A note costs about 1 us."""

    def __init__(self) -> None:
        self._kept: deque[RouterEvent] = deque(maxlen=_MOST)
        self.last = 0

    def note(self, kind: str, text: str, *, replica: str = "", request_id: str = "", tenant: str = "") -> None:
        self.last += 1
        self._kept.append(
            RouterEvent(
                number=self.last,
                at=time.time(),
                kind=kind,
                text=text[:_MAX_TEXT],
                replica=replica,
                request_id=request_id,
                tenant=tenant,
            )
        )

    def since(self, number: int) -> list[RouterEvent]:
        """Returns those after a number, the oldest first."""
        return list(takewhile(lambda each: each.number > number, reversed(self._kept)))[::-1]
