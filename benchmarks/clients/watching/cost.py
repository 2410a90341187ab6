"""Measures what open consoles cost: output tokens a second of a loaded cluster, with ten consoles open and with none.

First one page is opened in Chromium, to count what it asks for; then a process reads the router's answers as ten such
pages do, without drawing them. Rounds with and without alternate, so that other work on the machine disturbs both
alike. Tokens are those that the router counts. Prints a line a pair, and medians: the ratio of tokens a second; that of
tokens a CPU second of the cluster's processes and the readers, which other work on the machine disturbs less; and the
CPU time that each part uses more for as many tokens. Takes under six minutes; --page none needs no Chromium.
"""

import argparse
import http.client
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median

import psutil

from benchmarks.clients.watching.browser import BrowserError, chromium
from benchmarks.clients.watching.load import HOST, Cluster, cluster, loaded

FEED = "/console/data/feed"
_PAGE_S = 15.0
_COUNT = b"octavo_generation_tokens_total "
_NONE = "none"
# The first argument of the process that reads.
_READ = "read"


def read_feeds(port: int, count: int) -> int:
    """Reads a router's feed as open consoles do, without drawing it, until standard input ends. Prints a line once all
    feeds are open. Returns their bytes."""
    connections = [http.client.HTTPConnection(HOST, port, timeout=30) for _ in range(count)]
    chosen, num_bytes = selectors.DefaultSelector(), 0
    for each in connections:
        each.request("GET", FEED)
        answer = each.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{FEED}: HTTP {answer.status}")
        chosen.register(each.sock, selectors.EVENT_READ)
    chosen.register(sys.stdin, selectors.EVENT_READ)
    print(count, flush=True)
    while True:
        for key, _ in chosen.select():
            if key.fileobj is sys.stdin:
                return num_bytes
            # Past http.client, whose parts and chunks would cost more than the reading.
            if not (part := key.fileobj.recv(1 << 18)):  # type: ignore[union-attr]
                raise SystemExit("the router ended a feed")
            num_bytes += len(part)


@contextmanager
def consoles(running: Cluster, count: int) -> Iterator[psutil.Process | None]:
    """Has so many feeds read; yields the process that does it, None if there is nothing to read."""
    if not count:
        yield None
        return
    command = [sys.executable, "-m", "benchmarks.clients.watching.cost", _READ, str(running.http_port), str(count)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert int(process.stdout.readline()) == count
            yield psutil.Process(process.pid)
            process.stdin.close()
            assert int(process.stdout.readline()) > 0, "nothing was read"
        finally:
            process.kill()


def count_page(running: Cluster) -> dict[str, float]:
    """Opens a page in Chromium; returns what it asks for when it is opened, and a second from then on."""
    with chromium() as browser:
        page = browser.open()
        page.go(f"{running.url}/console#cluster")
        page.wait("document.getElementById('link').textContent.startsWith('live')", 60)
        opening = len(page.requests), page.num_bytes
        began = time.monotonic()
        time.sleep(_PAGE_S)
        seconds = time.monotonic() - began
        feeds = [url for url in page.requests if url.endswith(FEED)]
        assert len(feeds) == 1, f"a page opens {len(feeds)} feeds"
        return {
            "requests": opening[0],
            "bytes": opening[1],
            "requests_per_s": (len(page.requests) - opening[0]) / seconds,
            "bytes_per_s": (page.num_bytes - opening[1]) / seconds,
        }


def num_tokens(running: Cluster) -> int:
    """Returns the output tokens that the router has counted."""
    with closing(http.client.HTTPConnection(HOST, running.http_port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().splitlines()
    return int(float(next(line for line in lines if line.startswith(_COUNT)).split()[1]))


def cpu_seconds(*processes: psutil.Process) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measured(running: Cluster, count: int, seconds: float) -> dict[str, float]:
    """Returns tokens a second, and the shares of a core that the cluster's processes and the readers use."""
    with consoles(running, count) as reader:
        # The first messages, which tell what has happened before, are not what ten open pages cost.
        time.sleep(2)
        parts = {
            "router": [running.process("router")],
            "schedulers": [running.process("scheduler", index) for index in range(2)],
            "workers": [running.process("worker", index) for index in range(2)],
            "readers": [] if reader is None else [reader],
        }
        began = time.perf_counter()
        before = {name: cpu_seconds(*each) for name, each in parts.items()} | {"rate": num_tokens(running)}
        time.sleep(seconds)
        spent = time.perf_counter() - began
        after = {name: cpu_seconds(*each) for name, each in parts.items()} | {"rate": num_tokens(running)}
        return {name: (after[name] - before[name]) / spent for name in after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--consoles", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--page", choices=("chromium", _NONE), default="chromium", help="what counts a page's requests")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each pair")
    arguments = parser.parse_args()
    with cluster() as running, loaded(running, arguments.streams, max_tokens=400, is_even=True) as load:
        # Prompts are computed first, and streams begin and end at different times by then.
        while load.num_requests < arguments.streams // 2:
            time.sleep(0.5)
        if arguments.page != _NONE:
            try:
                show_page(count_page(running), as_json=arguments.json)
            except BrowserError as error:
                raise SystemExit(f"{error}; or use --page none") from None
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(arguments.pairs):
            rounds = {}
            # Which one is first alternates, too.
            for count in (0, arguments.consoles) if number % 2 else (arguments.consoles, 0):
                rounds[count] = measured(running, count, arguments.seconds)
            pairs.append((rounds[arguments.consoles], rounds[0]))
            show_pair(*pairs[-1], arguments.consoles, as_json=arguments.json)
        show_medians(pairs)


def show_page(page: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"page": page}), flush=True)
        return
    opened = f"{page['requests']} requests and {page['bytes'] / 1000:.0f} KB to open"
    then = f"{page['requests_per_s']:.2f} requests and {page['bytes_per_s'] / 1000:.1f} KB a second"
    print(f"a page: {opened}; then {then}", flush=True)


def per_cpu(figures: dict[str, float]) -> float:
    """Returns the tokens a CPU second of all parts together."""
    return figures["rate"] / sum(value for name, value in figures.items() if name != "rate")


def more_cores(with_: dict[str, float], without: dict[str, float]) -> dict[str, float]:
    """Returns the shares of a core that are used more for as many tokens as in the round without."""
    ratio = with_["rate"] / without["rate"]
    return {name: with_[name] / ratio - without[name] for name in with_ if name != "rate"}


def show_pair(with_: dict[str, float], without: dict[str, float], count: int, *, as_json: bool) -> None:
    ratio = with_["rate"] / without["rate"]
    if as_json:
        print(json.dumps({"consoles": count, "with": with_, "without": without, "ratio": ratio}), flush=True)
        return
    more = ", ".join(f"{name} {100 * value:+.1f}%" for name, value in more_cores(with_, without).items())
    shown = f"{with_['rate']:7.1f} tok/s with, {without['rate']:7.1f} without: {ratio:.3f}"
    print(f"{shown}; a CPU second: {per_cpu(with_) / per_cpu(without):.3f}; of a core: {more}", flush=True)


def show_medians(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    ratio = median(with_["rate"] / without["rate"] for with_, without in pairs)
    by_cpu = median(per_cpu(with_) / per_cpu(without) for with_, without in pairs)
    costs = [more_cores(*pair) for pair in pairs]
    more = ", ".join(f"{name} {100 * median(cost[name] for cost in costs):+.1f}%" for name in costs[0])
    shown = f"{ratio:.3f} of the tokens a second, {by_cpu:.3f} of those a CPU second"
    print(f"medians of {len(pairs)} pairs: {shown}; of a core: {more}")


if __name__ == "__main__":
    if sys.argv[1:2] == [_READ]:
        print(read_feeds(*map(int, sys.argv[2:])), flush=True)
    else:
        main()
