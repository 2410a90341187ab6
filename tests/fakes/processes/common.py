"""Code shared by the stand-ins for router, scheduler and worker. They know nothing of models; `octavo up` starts them
when this folder is its working directory, because `python -m router` then finds them first.

The environment sets how one behaves: FAKE_<KIND>=permanent (exits with 2), crash (exits with 1), stubborn (ignores
SIGTERM). FAKE_JOURNAL names a file to which each stand-in adds a line when it is told to end.
"""

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from configs.load import load_options
from configs.options import Options

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def start(kind: str) -> tuple[Options, Namespace]:
    """The options and flags from the launcher; the flags say which router, replica and so on this is."""
    parser = ArgumentParser()
    parser.add_argument("-c", required=True, type=Path)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--router", type=int, default=0)
    parser.add_argument("--process", type=int)
    arguments = parser.parse_args()
    behaviour = os.environ.get(f"FAKE_{kind.upper()}")
    if behaviour == "permanent":
        print(f"{kind}: the weights are corrupt", file=sys.stderr)
        sys.exit(2)
    if behaviour == "crash":
        print(f"{kind}: out of luck", file=sys.stderr)
        sys.exit(1)
    options = load_options(arguments.c)
    number = arguments.router if kind == "router" else arguments.replica
    print(f"{kind} {number} max_num_seqs={options.max_num_seqs}", flush=True)
    return options, arguments


def wait_until_told_to_end(kind: str) -> None:
    while True:
        signal.sigwait({signal.SIGTERM})
        if journal := os.environ.get("FAKE_JOURNAL"):
            with open(journal, "a") as file:
                file.write(kind + "\n")
        if os.environ.get(f"FAKE_{kind.upper()}") != "stubborn":
            return
