"""Measures what open consoles cost: output tokens a second of a loaded cluster, with ten consoles open and with none.

Rounds alternate, so that other work on the machine disturbs both alike. Prints a line a pair, and the median of the
pairs' ratios.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from benchmarks.clients.watching.load import HOST, Cluster, cluster, loaded


class OpenConsole:
    """Reads the feed as a page does, until it is closed."""

    def __init__(self, running: Cluster) -> None:
        self.num_bytes = 0
        self._connection = http.client.HTTPConnection(HOST, running.http_port, timeout=30)
        self._connection.request("GET", "/console/data/feed")
        self._answer = self._connection.getresponse()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # The router speaks once a second.
        self._is_over.set()
        self._thread.join(10)
        self._connection.close()

    def _read(self) -> None:
        while not self._is_over.is_set() and (line := self._answer.readline()):
            self.num_bytes += len(line)


@contextmanager
def consoles(running: Cluster, count: int) -> Iterator[list[OpenConsole]]:
    opened = [OpenConsole(running) for _ in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            with closing(each):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--consoles", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each pair")
    arguments = parser.parse_args()
    ratios = []
    with cluster() as running, loaded(running, arguments.streams, max_tokens=400) as load:
        time.sleep(arguments.seconds)
        for pair in range(arguments.pairs):
            # Which one is first alternates, too.
            rates = {}
            for count in (0, arguments.consoles) if pair % 2 else (arguments.consoles, 0):
                with consoles(running, count):
                    rates[count] = load.rate(arguments.seconds)
            ratios.append(rates[arguments.consoles] / rates[0])
            figures = {"consoles": arguments.consoles, "with": rates[arguments.consoles], "without": rates[0]}
            if arguments.json:
                print(json.dumps(figures | {"ratio": ratios[-1]}), flush=True)
            else:
                print(
                    f"{figures['with']:7.1f} tok/s with, {figures['without']:7.1f} without: {ratios[-1]:.3f}",
                    flush=True,
                )
        print(f"median of {len(ratios)} ratios: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
