"""`octavo`, with schedulers that draft in different ways: replica 0 has the first method, replica 1 the second.

The schedulers of one `octavo up` have the same options, but those of a cluster that is being changed may differ.
"""

import json
from dataclasses import replace
from pathlib import Path

from configs.options import Options
from octavo.cli.main import main
from octavo.cluster import launcher
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes

CONFIGS = ({"method": "ngram", "num_speculative_tokens": 6}, {"method": "suffix", "num_speculative_tokens": 3})


def different_processes(options: Options, config: Path, *, num_cores: int) -> list[ProcessSpec]:
    specs = cluster_processes(options, config, num_cores=num_cores)
    schedulers = [each for each in specs if each.stage is Stage.SCHEDULER]
    given = {
        each.name: (*each.command, "--speculative-config", json.dumps(own))
        for each, own in zip(schedulers, CONFIGS, strict=True)
    }
    return [replace(each, command=given.get(each.name, each.command)) for each in specs]


if __name__ == "__main__":
    launcher.cluster_processes = different_processes
    main()
