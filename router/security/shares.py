"""Memory that callers share: each gets at most as many bytes as are free.

One caller gets at most half of all, two a third each, and so on, so that there is always room for the next one (dynamic
thresholds; Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998).
"""

from collections import Counter


class SharedBytes:
    """Counts bytes by caller (security.identity.caller_share)."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._num_bytes.total()

    def of(self, caller: str) -> int:
        return self._num_bytes[caller]

    def take(self, caller: str, size: int) -> bool:
        """Adds bytes to a caller's. Returns False, and adds nothing, if it would have more than stay free."""
        if self._num_bytes[caller] + size > self.max_bytes - self.total:
            return False
        self._num_bytes[caller] += size
        return True

    def give_back(self, caller: str, size: int) -> None:
        self._num_bytes[caller] -= size
        if not self._num_bytes[caller]:
            del self._num_bytes[caller]
