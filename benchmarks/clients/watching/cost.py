"""Measures what open consoles cost: output tokens a second of a loaded cluster, with ten consoles open and with none.

Rounds alternate, so that other work on the machine disturbs both alike. Prints a line a pair, and medians: the ratio of
tokens, and the CPU time that router and schedulers use more.
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
    ratios, costs = [], []
    with cluster() as running, loaded(running, arguments.streams, max_tokens=400) as load:
        # Prompts are computed first.
        while load.num_tokens < 4 * arguments.streams:
            time.sleep(0.5)
        for pair in range(arguments.pairs):
            rates, cpu = {}, {}
            # Which one is first alternates, too.
            for count in (0, arguments.consoles) if pair % 2 else (arguments.consoles, 0):
                with consoles(running, count):
                    before = cpu_seconds(running)
                    rates[count] = load.rate(arguments.seconds)
                    cpu[count] = (cpu_seconds(running) - before) / arguments.seconds
            ratios.append(rates[arguments.consoles] / rates[0])
            costs.append(cpu[arguments.consoles] - cpu[0])
            figures = {"consoles": arguments.consoles, "with": rates[arguments.consoles], "without": rates[0]}
            if arguments.json:
                print(json.dumps(figures | {"ratio": ratios[-1], "more_cores": costs[-1]}), flush=True)
            else:
                shown = f"{figures['with']:7.1f} tok/s with, {figures['without']:7.1f} without"
                print(f"{shown}: {ratios[-1]:.3f}; {100 * costs[-1]:.1f}% of a core more", flush=True)
        ratio, more = statistics.median(ratios), 100 * statistics.median(costs)
        print(f"medians: {ratio:.3f} of the tokens, {more:.1f}% of a core more")


def cpu_seconds(running: Cluster) -> float:
    """Returns the CPU time that router and schedulers have used: what other work on the machine disturbs less."""
    processes = [running.process("router"), *(running.process("scheduler", index) for index in range(2))]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


if __name__ == "__main__":
    main()
