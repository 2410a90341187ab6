"""Runs `octavo top` under tmux at 80 x 24: at rest, under load, at the kill of a scheduler, a drain and a migration.

Prints each pane, and ends with exit code 1 if one lacks what it must show. Needs the program tmux; takes two minutes.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.clients.watching.load import Cluster, cluster, loaded

_SESSION = "octavo-top"
_SOCKET = ("tmux", "-L", _SESSION)
_WAIT_S = 40.0


class Terminal:
    """A tmux server of its own, with `octavo top` in it."""

    def __init__(self, target: str) -> None:
        main = "from octavo.cli.main import main; main()"
        command = [sys.executable, "-c", main, "top", "--target", target]
        self._run("new-session", "-d", "-s", _SESSION, "-x", "80", "-y", "24", *command)

    def pane(self) -> str:
        return self._run("capture-pane", "-p", "-t", _SESSION)

    def press(self, *keys: str) -> None:
        self._run("send-keys", "-t", _SESSION, *keys)

    def close(self) -> None:
        subprocess.run([*_SOCKET, "kill-server"], check=False, capture_output=True)

    def _run(self, *command: str) -> str:
        return subprocess.run([*_SOCKET, *command], check=True, capture_output=True, text=True).stdout


def show(terminal: Terminal, title: str, wanted: Callable[[str], bool]) -> bool:
    """Prints the pane once it shows what is wanted, or as it is when the time is over. Returns whether it did."""
    deadline = time.monotonic() + _WAIT_S
    while not (is_there := wanted(pane := terminal.pane())) and time.monotonic() < deadline:
        time.sleep(0.1)
    width = max(map(len, pane.splitlines()), default=0)
    verdict = "as wanted" if is_there else "NOT AS WANTED"
    print(f"=== {title}: {verdict}, {width} columns\n{pane.rstrip()}\n", flush=True)
    return is_there and width <= 80


def watch(running: Cluster, terminal: Terminal) -> list[bool]:
    seen = [show(terminal, "at rest", lambda pane: pane.count("ready") == 2 and ": 0 streams" in pane)]
    with loaded(running, 12, max_tokens=400):
        seen.append(show(terminal, "under load", lambda pane: ": 12 streams" in pane and "decode" in pane))
        running.process("scheduler").kill()
        seen.append(show(terminal, "a scheduler is killed", lambda pane: "away" in pane))
        seen.append(show(terminal, "it is back", lambda pane: pane.count("ready") == 2))
        time.sleep(8)
        terminal.press("Tab", "m")
        seen.append(show(terminal, "a migration is asked for", lambda pane: "Move request" in pane))
        terminal.press("y")
        seen.append(show(terminal, "the request has moved", lambda pane: "moved after" in pane))
        terminal.press("Enter")
        seen.append(show(terminal, "it is explained", lambda pane: "on replica" in pane and "decode" in pane))
        terminal.press("Escape")
        # Together with another key, Escape is Alt.
        seen.append(show(terminal, "back at the tables", lambda pane: "streams" in pane and "on replica" not in pane))
        terminal.press("Tab", "d")
        seen.append(show(terminal, "a drain is asked for", lambda pane: "Drain replica" in pane))
        terminal.press("y")
        seen.append(show(terminal, "a replica is drained", lambda pane: "drained" in pane and "rank" in pane))
        terminal.press("r", "y")
        seen.append(show(terminal, "and released", lambda pane: pane.count("ready") == 2))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if shutil.which("tmux") is None:
        raise SystemExit("there is no program tmux: apt-get install tmux")
    with cluster() as running:
        terminal = Terminal(f"127.0.0.1:{running.port}")
        try:
            seen = watch(running, terminal)
        finally:
            terminal.close()
    print(f"{sum(seen)} of {len(seen)} panes as wanted")
    raise SystemExit(not all(seen))


if __name__ == "__main__":
    main()
