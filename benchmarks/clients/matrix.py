"""Tries unmodified HTTP clients, each in an environment of its own, against a cluster with real weights on the CPU.

    python -m benchmarks.clients.matrix                         all of them
    python -m benchmarks.clients.matrix --only openai,guidellm  some of them
    python -m benchmarks.clients.matrix --dir DIR               environments in DIR, not in ~/.cache/octavo/peers/matrix

Prints the matrix of docs/clients/http.md: what works, what is refused and why, what fails. A client whose packages
can't be installed is listed as such. Exits with 1 if anything fails. The first run installs about 7 GB, in about 10
minutes; later ones take about 9 minutes on two busy cores.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clients.case import Case, cluster
from benchmarks.clients.catalogue import CLIENTS, Client
from benchmarks.clients.environments import Environment, LackingError, prepare
from benchmarks.clients.page import Outcome, Tried, outcome_of, shown
from benchmarks.peers.directory import peer_directory

_RUN_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(each.name for each in CLIENTS), help="comma-separated")
    parser.add_argument("--dir", type=Path, default=peer_directory("matrix"), help="where environments are kept")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - {each.name for each in CLIENTS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: there are {', '.join(each.name for each in CLIENTS)}")
    chosen = [each for each in CLIENTS if each.name in names]
    environments = [_prepared(client, arguments.dir.resolve() / client.name) for client in chosen]
    outcomes = list(_outcomes(chosen, environments))
    print("\n".join(shown(outcomes)))
    return int(any(each.has_failed for each in outcomes))


def _prepared(client: Client, directory: Path) -> Environment | LackingError:
    try:
        return prepare(client, directory)
    except LackingError as lacking:
        return lacking


def _outcomes(clients: Sequence[Client], environments: Sequence[Environment | LackingError]) -> Sequence[Outcome]:
    with cluster() as case:
        return [_outcome(client, environment, case) for client, environment in zip(clients, environments, strict=True)]


def _outcome(client: Client, environment: Environment | LackingError, case: Case) -> Outcome:
    if isinstance(environment, LackingError):
        return Outcome(client.title, "", (Tried("the client", "not installed", str(environment)),))
    print(f"trying {client.title} {environment.version}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [*environment.command, case.json()],
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Outcome(client.title, environment.version, (Tried("the program", "fails", f"not done in {_RUN_S} s"),))
    return outcome_of(client.title, environment.version, done)


if __name__ == "__main__":
    sys.exit(main())
