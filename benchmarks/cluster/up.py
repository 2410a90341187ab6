"""Starts `octavo up` as users do, and stops it."""

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
_MAIN = "from octavo.cli.main import main; main()"
_STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def started(
    *flags: object,
    environment: Mapping[str, str] | None = None,
    output: int = subprocess.PIPE,
    text: bool = True,
    source: Path = ROOT,
) -> Iterator[subprocess.Popen[Any]]:
    """Runs `octavo up` with sockets of its own, and without HTTP and metrics unless a flag asks for them.

    environment: variables in addition to this process's. output: a file descriptor for stdout and stderr. source: the
    checkout that is run.
    """
    with tempfile.TemporaryDirectory() as directory:
        # With -c and -m, Python looks into its working directory first.
        command = [OCTAVO] if source == ROOT else [sys.executable, "-c", _MAIN]
        own = (f"--runtime-dir={directory}/run", "--http-port=0", "--metrics-port=0")
        up = subprocess.Popen(
            [*command, "up", *own, *map(str, flags)],
            cwd=source,
            env={**os.environ, **(environment or {})},
            text=text,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output == subprocess.PIPE else output,
        )
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
def serving(*flags: object, source: Path = ROOT) -> Iterator[tuple[subprocess.Popen[Any], list[str]]]:
    """Like `started`, but yields once the cluster serves, with the lines printed until then. Raises SystemExit if
    `octavo up` ends before that. source: as in `started`."""
    with started(*flags, source=source) as up:
        assert up.stdout is not None
        lines: list[str] = []
        for line in up.stdout:
            lines.append(line)
            if _SERVING in line:
                break
        else:
            raise SystemExit(f"`octavo up` ended with exit code {up.wait()}:\n{''.join(lines)}")
        # Drains the pipe: once full, it would block the cluster.
        reader = threading.Thread(target=deque, args=(up.stdout, 0), daemon=True)
        reader.start()
        try:
            yield up, lines
        finally:
            up.send_signal(signal.SIGTERM)
            reader.join(_STOP_TIMEOUT_S)
