"""A wall clock that can be set, for the processes of one cluster."""

import shutil
import struct
import subprocess
from pathlib import Path

_SHIM = Path(__file__).with_name("clock_shim.c")


def why_no_clock() -> str:
    """Says what this machine lacks; empty: nothing."""
    return "" if shutil.which("gcc") else "no gcc, which compiles the shim of the clock"


class FakeClock:
    """Starts with the true time. `environment` is for the processes that shall see it."""

    def __init__(self, directory: Path) -> None:
        """Raises CalledProcessError if the shim can't be compiled."""
        self._file = directory / "clock"
        self._file.write_bytes(struct.pack("=q", 0))
        self.environment: dict[str, str] = {}
        if not why_no_clock():
            library = directory / "clock_shim.so"
            subprocess.run(
                ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl", "-lpthread"], check=True
            )
            self.environment = {"LD_PRELOAD": str(library), "GREY_CLOCK_FILE": str(self._file)}

    def set_to(self, seconds: float) -> None:
        """Sets the clock to so many seconds after the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))
