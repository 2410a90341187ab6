"""The core's number of a group, made of its Session and of the router's number for it, so that columns of outputs can
be split by Session without looking up anything."""

import numpy as np

_ROUTER_BITS = 38
# What a router may number its groups up to, and a scheduler its Sessions: together less than 2**62.
MAX_ROUTER_GROUP = (1 << _ROUTER_BITS) - 1
MAX_SESSION = (1 << 24) - 1


def group_number(session: int, router_group: int) -> int:
    """Never the same for two Sessions, nor for two groups of one."""
    assert 0 < session <= MAX_SESSION, f"Session {session}: a scheduler numbers them up to {MAX_SESSION}"
    assert 0 <= router_group <= MAX_ROUTER_GROUP, "submissions check it"
    return session << _ROUTER_BITS | router_group


def split_numbers(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 columns of (Sessions, routers' groups) from one of the core's groups."""
    return groups >> _ROUTER_BITS, groups & MAX_ROUTER_GROUP
