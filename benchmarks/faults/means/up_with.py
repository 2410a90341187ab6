"""`octavo up`, with further flags for some processes.

    python -m benchmarks.faults.means.up_with '{"router": [["--scheduler-addresses", "..."]]}' up [FLAG ...]

Flags are given by kind of process: for each replica, or once for all. So routers and workers dial relays, while
schedulers listen at their own addresses, and replicas draft in different ways: those of one `octavo up` have the same
options, but those of a cluster that is being changed may differ.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.options import Options
from octavo.cli.main import main
from octavo.cluster import launcher
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes

_DRAFTS = "--speculative-config"
_SCHEDULER = "benchmarks.faults.means.scheduler"


def with_flags(own: Mapping[str, Sequence[Sequence[str]]]) -> Callable[..., list[ProcessSpec]]:
    """Returns a function like `cluster_processes` whose processes have these flags, too. A scheduler with drafts of its
    own is one to which they cost nothing."""

    def processes(options: Options, config: Path, *, num_cores: int) -> list[ProcessSpec]:
        return [
            _with(spec, own.get(spec.stage.name.lower(), ()))
            for spec in cluster_processes(options, config, num_cores=num_cores)
        ]

    return processes


def _with(spec: ProcessSpec, own: Sequence[Sequence[str]]) -> ProcessSpec:
    command = spec.command
    if not own:
        return spec
    flags = own[int(command[command.index("--replica") + 1])] if len(own) > 1 else own[0]
    if spec.stage is Stage.SCHEDULER and _DRAFTS in flags:
        command = tuple(_SCHEDULER if part == "scheduler" else part for part in command)
    return replace(spec, command=(*command, *flags))


if __name__ == "__main__":
    launcher.cluster_processes = with_flags(json.loads(sys.argv.pop(1)))
    main()
