"""What to do with bytes that make no sense: count them, say so once, go on."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("octavo.scheduler")

_MAX_PEERS = 1024
# Lines a minute, from all peers together.
_MAX_LINES = 10


class InvalidMessages:
    """Safe to use from several threads. A flood of them fills no log: a line a peer, and ten a minute in all."""

    def __init__(self, count: Callable[[], None]) -> None:
        """count: called for each invalid message."""
        self._count = count
        self._lock = threading.Lock()
        self._peers: set[bytes] = set()
        self._line_times: deque[float] = deque(maxlen=_MAX_LINES)

    def note(self, peer: bytes, why: str) -> None:
        """peer: a ZeroMQ identity."""
        self._count()
        with self._lock:
            now = time.monotonic()
            is_flood = len(self._line_times) == _MAX_LINES and now - self._line_times[0] < 60.0
            if peer in self._peers or is_flood:
                return
            if len(self._peers) >= _MAX_PEERS:
                self._peers.clear()
            self._peers.add(peer)
            self._line_times.append(now)
        log.warning("a message of peer %r is ignored: %s (said once a peer; all are counted)", peer[:64], why)
