"""Computes the requests of an event loop in a thread, step after step, while there are any."""

import threading
from collections import deque
from collections.abc import Callable

from octavo.client.errors import OctavoError
from octavo.client.results import Generation
from octavo.local.request import LocalRequest
from octavo.local.running import Running

# Called from the engine's thread when a request has new output, with None, or can't go on, with the reason.
OnNews = Callable[[Exception | None], None]


class EngineThread:
    """Owns the engine of `running`: only this thread uses it. All methods may be called from any thread."""

    def __init__(self, running: Running) -> None:
        self._running = running
        # Requests that have begun and neither finished nor failed.
        self._news: dict[LocalRequest, OnNews] = {}
        self._commands: deque[Callable[[], None]] = deque()
        # Guards what is above, as far as other threads write it.
        self._changed = threading.Condition()
        self._is_closing = False
        # Why the engine computes no more; None: it does.
        self._failure: Exception | None = None
        # Held while requests take tokens.
        self._folding = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the engine's failure, if it has failed or is closed."""
        if self._failure is not None:
            raise self._failure

    def submit(self, request: LocalRequest, on_news: OnNews) -> None:
        """Begins a request. Raises as `check` does."""

        def begin() -> None:
            try:
                self._running.add(request)
            except OctavoError as error:
                self._tell(request, error)
            else:
                if request.finished:
                    self._tell(request, None)

        with self._changed:
            self.check()
            self._news[request] = on_news
            self._commands.append(begin)
            self._changed.notify()

    def cancel(self, request: LocalRequest) -> None:
        """Ends a request, if it still runs: what is left of it counts as cancelled."""

        def end() -> None:
            with self._folding:
                self._running.cancel(request)
            if request in self._news:
                self._tell(request, None)

        with self._changed:
            self._commands.append(end)
            self._changed.notify()

    def generation(self, request: LocalRequest) -> Generation:
        """The request's output so far."""
        with self._folding:
            return request.generation()

    def close(self) -> None:
        """Ends the thread after its current step; requests that still run fail."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        failure = RuntimeError("the LLM has been shut down")
        try:
            while self._obey():
                if self._running.live:
                    self._step()
        except Exception as error:  # noqa: BLE001 (each request raises it: the engine is broken)
            failure = error
        with self._changed:
            self._failure = failure
        for request in list(self._news):
            self._tell(request, failure)
        self._running.drop_all()

    def _obey(self) -> bool:
        """Runs commands; waits for one if nothing is live. Returns False once the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._is_closing or self._running.live)
            commands = list(self._commands)
            self._commands.clear()
        if self._is_closing:
            return False
        for command in commands:
            command()
        return True

    def _step(self) -> None:
        output = self._running.step()
        with self._folding:
            got = self._running.take(output)
        for request, error in got.items():
            self._tell(request, error)

    def _tell(self, request: LocalRequest, error: Exception | None) -> None:
        ended = error is not None or request.finished
        on_news = self._news.pop(request) if ended else self._news[request]
        on_news(error)
