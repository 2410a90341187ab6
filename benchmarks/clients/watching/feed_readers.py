"""Reads a router's feed as open consoles do, without drawing it.

    python -m benchmarks.clients.watching.feed_readers PORT COUNT

Prints a line once all feeds are open, and the bytes that it has read when its input ends.
"""

import http.client
import selectors
import sys

from benchmarks.clients.watching.load import HOST

FEED = "/console/data/feed"


def read_feeds(port: int, count: int) -> int:
    """Reads until standard input ends. Returns the bytes of all feeds."""
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


if __name__ == "__main__":
    print(read_feeds(int(sys.argv[1]), int(sys.argv[2])), flush=True)
