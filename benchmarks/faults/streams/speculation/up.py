"""`octavo`, with replicas that draft in different ways: replica 0 has the first method, replica 1 the second.

    python -m benchmarks.faults.streams.speculation.up DRAFTERS up --model=...

The replicas of one `octavo up` have the same options, but those of a cluster that is being changed may differ.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.options import Options
from octavo.cli.main import main
from octavo.cluster import launcher
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes
from tests.support.models.smollm2_head import write_smollm2_head

# Layers of the last of two stages.
_KEPT_LAYERS = (18, 24, 29)


def configs_of(drafters: str, directory: Path) -> Sequence[dict[str, Any]]:
    """The speculative_config of each replica. directory: for weights of heads."""
    if drafters == "scheduler":
        return (
            {"method": "ngram", "num_speculative_tokens": 6},
            {"method": "suffix", "num_speculative_tokens": 3},
        )
    return (
        {"method": "draft_model", "model": "same", "quantization": "int4", "num_speculative_tokens": 4},
        {
            "method": "eagle3",
            "model": str(write_smollm2_head(directory, kept_layers=_KEPT_LAYERS)),
            "num_speculative_tokens": 3,
        },
    )


def different_processes(configs: Sequence[dict[str, Any]]) -> Callable[..., list[ProcessSpec]]:
    """As `cluster_processes`, but the processes of replica i have the speculative_config configs[i]."""

    def processes(options: Options, config: Path, *, num_cores: int) -> list[ProcessSpec]:
        specs: list[ProcessSpec] = []
        for spec in cluster_processes(options, config, num_cores=num_cores):
            command = spec.command
            if spec.stage is not Stage.ROUTER:
                own = configs[int(command[command.index("--replica") + 1])]
                command = (*command, "--speculative-config", json.dumps(own))
            if spec.stage is Stage.SCHEDULER:
                command = tuple(
                    "benchmarks.faults.streams.speculation.scheduler" if part == "scheduler" else part
                    for part in command
                )
            specs.append(replace(spec, command=command))
        return specs

    return processes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        launcher.cluster_processes = different_processes(configs_of(sys.argv.pop(1), Path(made)))
        main()
