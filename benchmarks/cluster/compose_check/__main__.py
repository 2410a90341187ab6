"""Tries docker-compose.yml with real containers: streams, kills, restarts, health, volumes, stops.

    scripts/compose_check.sh     prepares the machine, builds the image, and runs this

Needs the image, and an engine (docker or podman). Prints a table; the exit code is 1 if a line of it is not as it
should be. Takes about five minutes on two cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.compose_check.checks import Checks
from benchmarks.cluster.compose_check.project import CommandError, Project
from benchmarks.cluster.compose_check.streams import Ports

_TWO_REPLICAS = Path("docker-compose.yml")
_THIRD_REPLICA = Path("deploy/compose/third-replica.yml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("docker", "podman"), required=True, help="command that runs containers")
    parser.add_argument("--compose", required=True, help="command that reads docker-compose.yml, with its options")
    parser.add_argument("--project", default="octavo-check", help="Compose's name for the project")
    parser.add_argument("--fact", action="append", default=[], help="NAME=VALUE: a line to print with the table")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, too")
    arguments = parser.parse_args()

    ports = Ports(
        grpc=int(os.environ.get("GRPC_PORT", "50051")),
        http=int(os.environ.get("HTTP_PORT", "8000")),
        metrics=int(os.environ.get("METRICS_PORT", "9090")),
    )
    compose = arguments.compose.split()
    with tempfile.TemporaryDirectory() as scratch:
        two, three = (
            Project(arguments.engine, compose, arguments.project, files, Path(scratch))
            for files in ([_TWO_REPLICAS], [_TWO_REPLICAS, _THIRD_REPLICA])
        )
        checks = Checks(two, three, ports)
        for fact in arguments.fact:
            checks.add(*fact.split("=", 1))
        try:
            asyncio.run(checks.run())
        except (CommandError, TimeoutError, RuntimeError, OSError, ExceptionGroup) as error:
            traceback.print_exc()
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            checks.add("ended early", f"{type(cause).__name__}: {cause}", is_good=False)
            checks.print_logs()
        finally:
            three.compose("down", "--volumes")

    table = Table("check", "result", "")
    for row in checks.rows:
        table.add_row(row.name, row.result, "" if row.is_good is None else ("ok" if row.is_good else "FAILED"))
    Console(width=140).print(table)
    if arguments.json:
        print(json.dumps([{"check": row.name, "result": row.result, "is_good": row.is_good} for row in checks.rows]))
    return int(any(row.is_good is False for row in checks.rows))


if __name__ == "__main__":
    sys.exit(main())
