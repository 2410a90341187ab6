"""`octavo up`, with further flags for the processes of one kind.

    python -m benchmarks.faults.grey.means.relayed_up '{"router": ["--scheduler-addresses", "..."]}' up [FLAG ...]

So routers and workers dial relays, while schedulers listen at their own addresses.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from configs.options import Options
from octavo.cli.main import main
from octavo.cluster import launcher
from octavo.cluster.processes import ProcessSpec, cluster_processes

if __name__ == "__main__":
    flags: dict[str, list[str]] = json.loads(sys.argv.pop(1))

    def with_flags(options: Options, config: Path, *, num_cores: int) -> list[ProcessSpec]:
        specs = cluster_processes(options, config, num_cores=num_cores)
        return [replace(spec, command=(*spec.command, *flags.get(spec.stage.name.lower(), ()))) for spec in specs]

    launcher.cluster_processes = with_flags
    main()
