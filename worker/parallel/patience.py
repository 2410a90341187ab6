"""Calls that may never return, and how not to wait for them."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

# Between looks at whether somebody still wants the result.
_PAUSE_S = 0.02


class _NobodyWaits(Exception):
    """Ends a call whose result is not wanted any more."""


def patiently(call: Callable[[Callable[[], None]], _T], while_waiting: Callable[[], None]) -> _T:
    """What `call`, on a thread of its own, returns or raises; while_waiting is called here meanwhile, again and again.

    If while_waiting raises, that is raised at once, and the thread is left behind: it ends when its call does, which
    may be as late as the process. The call is given a function to call in loops of its own; it raises once nobody
    waits.
    """
    is_left = threading.Event()
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def check() -> None:
        if is_left.is_set():
            raise _NobodyWaits

    def run() -> None:
        try:
            outcome.set_result(call(check))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="patiently", daemon=True).start()
    try:
        while not concurrent.futures.wait([outcome], _PAUSE_S).done:
            while_waiting()
    except BaseException:
        is_left.set()
        raise
    return outcome.result()
