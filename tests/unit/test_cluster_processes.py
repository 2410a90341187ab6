"""Which processes of a cluster are started along with which others."""

from pathlib import Path

import pytest

from configs.options import Options
from octavo.cluster.processes import cluster_processes


@pytest.mark.parametrize(
    ("num_cores", "waves"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (4, [0, 0, 1, 1]), (64, [0, 0, 0, 0])]
)
def test_few_cores_start_one_replica_after_the_other(num_cores: int, waves: list[int]) -> None:
    specs = {
        spec.name: spec.wave
        for spec in cluster_processes(Options(data_parallel_size=4), Path("options.yaml"), num_cores=num_cores)
    }
    assert [specs[f"worker {replica}.0"] for replica in range(4)] == waves
    assert [specs[f"scheduler {replica}"] for replica in range(4)] == waves, "a worker loads once its scheduler says so"
    assert specs["router"] == 0
