"""Room that callers share: each gets at most as much as is free, times its weight.

With equal weights, one caller gets at most half of all, two a third each, and so on, so that there is always room for
the next one (dynamic thresholds; Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998).
"""

from collections import Counter
from collections.abc import Iterable


class SharedRoom:
    """Counts units, such as bytes or requests, by caller."""

    def __init__(self, size: int) -> None:
        """size: the units in all."""
        self.size = size
        # The units taken.
        self.total = 0
        self._taken: Counter[str] = Counter()

    @property
    def callers(self) -> Iterable[str]:
        """Those who have something, in the order in which they began."""
        return self._taken.keys()

    def of(self, caller: str) -> int:
        """The units that a caller has."""
        return self._taken[caller]

    def fits(self, caller: str, amount: int, weight: float = 1.0) -> bool:
        """True if the caller may take `amount` more: it then has at most as many as stay free, times its weight."""
        num_free = self.size - self.total
        if amount > num_free:
            return False
        return self._taken[caller] + amount <= weight * num_free

    def take(self, caller: str, amount: int, weight: float = 1.0) -> bool:
        """Adds units to a caller's. Returns False, and adds nothing, if they do not fit."""
        if not self.fits(caller, amount, weight):
            return False
        self.add(caller, amount)
        return True

    def add(self, caller: str, amount: int) -> None:
        """Adds units to a caller's, even if they do not fit."""
        self._taken[caller] += amount
        self.total += amount

    def give_back(self, caller: str, amount: int) -> None:
        self._taken[caller] -= amount
        self.total -= amount
        if not self._taken[caller]:
            del self._taken[caller]
