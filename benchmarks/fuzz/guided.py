"""Coverage-guided fuzzing (atheris, libFuzzer) of one edge that takes messages without a socket."""

import asyncio
import importlib
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz.edge import Kind

_NUM_SEEDS = 200
_PACKAGES = ("router", "scheduler", "worker", "runtime")


def run_guided(name: str, num_messages: int, seed: int) -> int:
    """Runs until a message fails or `num_messages` have been fed; libFuzzer then ends the process, and prints where the
    failing message is. Raises SystemExit if atheris is not installed."""
    try:
        atheris: Any = importlib.import_module("atheris")
    except ModuleNotFoundError:
        raise SystemExit("--engine atheris needs the Python package atheris: install octavo[fuzz]") from None
    # Imported here, so that everything that the edges import is instrumented.
    with atheris.instrument_imports(include=list(_PACKAGES)):
        from benchmarks.fuzz.edges import KINDS
    kind: Kind = KINDS[name]
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        root = Path(directory)
        opened = kind.opened(root)
        edge = loop.run_until_complete(opened.__aenter__())
        corpus = root / "corpus"
        corpus.mkdir()
        random = Random(seed)
        for index in range(_NUM_SEEDS):
            (corpus / str(index)).write_bytes(edge.malformed(random))

        def feed(message: bytes) -> None:
            if message:
                loop.run_until_complete(edge.feed(message))

        atheris.Setup([sys.argv[0], f"-runs={num_messages}", f"-seed={seed}", "-rss_limit_mb=4096", str(corpus)], feed)
        atheris.Fuzz()
    return 0
