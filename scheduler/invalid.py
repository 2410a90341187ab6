"""What to do with bytes that make no sense: count them, say so once, go on."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("octavo.scheduler")

_MAX_PEERS = 1024
_LOG_INTERVAL_S = 1.0


class InvalidMessages:
    """Safe to use from several threads. A flood of them costs no log: a line a peer, and one a second in all."""

    def __init__(self, count: Callable[[], None]) -> None:
        """count: called for each invalid message."""
        self._count = count
        self._lock = threading.Lock()
        self._peers: set[bytes] = set()
        self._next_line = 0.0

    def note(self, peer: bytes, why: str) -> None:
        """peer: a ZeroMQ identity."""
        self._count()
        with self._lock:
            now = time.monotonic()
            if peer in self._peers or now < self._next_line:
                return
            if len(self._peers) >= _MAX_PEERS:
                self._peers.clear()
            self._peers.add(peer)
            self._next_line = now + _LOG_INTERVAL_S
        log.warning("a message of peer %r is ignored: %s (said once a peer; all are counted)", peer[:64], why)
