"""Where a scheduler is: at an address for good, or wherever a file says that it is now."""

import asyncio
import logging
from pathlib import Path

log = logging.getLogger("octavo.router.replicas")

_FILE = "file:"
# A scheduler that comes back elsewhere has taken seconds to do so.
_LOOK_S = 0.25


class Whereabouts:
    """Of one entry of scheduler_addresses: an address that gRPC knows, or file:PATH of a file that holds one. Whoever
    moves the scheduler replaces that file (writes another and renames it); until it is there, nobody knows."""

    def __init__(self, entry: str) -> None:
        self.is_fixed = not entry.startswith(_FILE)
        self._entry, self._path = entry, Path(entry.removeprefix(_FILE))

    async def other_than(self, address: str) -> str:
        """The address, once it is another one than that; empty asks for any. One that is fixed stays."""
        if self.is_fixed:
            if address:
                await asyncio.Event().wait()
            return self._entry
        cause = ""
        while True:
            try:
                found = self._path.read_text().strip()
            except FileNotFoundError:
                found = ""
            except (OSError, UnicodeDecodeError) as error:
                found = ""
                if cause != (cause := str(error)):
                    log.warning("scheduler_addresses: %s cannot be read: %s", self._entry, cause)
            if found and found != address:
                return found
            await asyncio.sleep(_LOOK_S)
