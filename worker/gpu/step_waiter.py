"""Says when the device has reached a place, so that nobody has to ask again and again."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from worker.gpu.device import Event

_log = logging.getLogger("octavo.worker")


class StepWaiter:
    """One thread, which begins with the first call; it waits without the interpreter's lock, for one event after the
    other. A daemon: a device that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Event, Callable[[], None]]] = SimpleQueue()
        self._has_begun = False

    def call_when_reached(self, event: Event, callback: Callable[[], None]) -> None:
        """callback: called on the thread. Events come in the device's order."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name="step-waiter", daemon=True).start()
        self._queue.put((event, callback))

    def _run(self) -> None:
        while True:
            event, callback = self._queue.get()
            try:
                event.synchronize()
            except RuntimeError as error:
                # Who takes the step's result gets it, too, and can do something about it.
                _log.debug("waiting for a step failed: %s", error)
            callback()
