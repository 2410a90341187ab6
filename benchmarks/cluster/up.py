"""Starts `octavo up` as users do, and ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OCTAVO = str(Path(sys.executable).with_name("octavo"))
LOCAL = "configs/local.yaml"
_SERVING = "serving; Ctrl-C to stop"
_STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def started(
    *flags: object, environment: Mapping[str, str] | None = None, output: int = subprocess.PIPE, text: bool = True
) -> Iterator[subprocess.Popen[Any]]:
    """`octavo up` with sockets of its own, and without HTTP and metrics unless a flag asks for them.

    environment: variables beside those of this process. output: a file descriptor for what it prints.
    """
    with tempfile.TemporaryDirectory() as directory:
        own = (f"--runtime-dir={directory}/run", "--http-port=0", "--metrics-port=0")
        up = subprocess.Popen(
            [OCTAVO, "up", *own, *map(str, flags)],
            cwd=ROOT, env={**os.environ, **(environment or {})}, text=text,
            stdin=subprocess.DEVNULL, stdout=output, stderr=None if output == subprocess.PIPE else output,
        )  # fmt: skip
        try:
            yield up
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.communicate()


@contextlib.contextmanager
def serving(*flags: object) -> Iterator[tuple[subprocess.Popen[Any], list[str]]]:
    """As `started`, once it serves; with the lines that it printed before. Raises SystemExit if it ends before that."""
    with started(*flags) as up:
        assert up.stdout is not None
        lines: list[str] = []
        for line in up.stdout:
            lines.append(line)
            if _SERVING in line:
                break
        else:
            raise SystemExit(f"`octavo up` has ended, with {up.wait()}:\n{''.join(lines)}")
        # Nobody else reads what it prints from now on.
        reader = threading.Thread(target=deque, args=(up.stdout, 0), daemon=True)
        reader.start()
        try:
            yield up, lines
        finally:
            up.send_signal(signal.SIGTERM)
            reader.join(_STOP_TIMEOUT_S)
