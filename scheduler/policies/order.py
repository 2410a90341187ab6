"""Who goes first: a policy gives a group's place from its request and its arrival number.

The lowest runs first and is preempted last. Arrival is unique, so that no two groups are equal, and survives
preemption.
"""

from collections.abc import Callable
from math import inf

from scheduler.messages import GroupRequest

OrderPolicy = Callable[[GroupRequest, int], tuple[float, int]]


def fcfs(request: GroupRequest, arrival: int) -> tuple[float, int]:
    """First come, first served."""
    return 0, arrival


def priority(request: GroupRequest, arrival: int) -> tuple[float, int]:
    """The lowest priority number first, then first come."""
    return request.priority, arrival


def deadline(request: GroupRequest, arrival: int) -> tuple[float, int]:
    """The earliest deadline first (Liu and Layland, 1973); those without one last; then first come."""
    return inf if request.deadline is None else request.deadline, arrival


ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": fcfs, "priority": priority, "deadline": deadline}
