"""The outputs of one request of an AsyncLLM, kept until its reader takes them."""

import asyncio
from collections.abc import AsyncIterator, Callable

from octavo.client.results import Generation


class OutputFlow:
    """Tells a reader that there is something new. What a slow reader has missed comes together, in one output."""

    def __init__(self) -> None:
        """Belongs to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def notify(self, error: Exception | None = None) -> None:
        """Notes new output, or the error that ends the request. Callable from any thread."""
        # The loop may have ended: then nobody reads.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._note, error)

    def _note(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._news.set()

    async def read(self, generation: Callable[[], Generation]) -> AsyncIterator[Generation]:
        """Yields the output so far whenever there is more, until it has finished. Raises the request's error."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            yield (now := generation())
            if now.finished:
                return
