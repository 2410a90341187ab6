"""The processes of a cluster, and which of them start together."""

from pathlib import Path

import pytest

from configs.options import Options
from octavo.cluster.processes import Stage, cluster_processes


@pytest.mark.parametrize(
    ("num_cores", "waves"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (4, [0, 0, 1, 1]), (64, [0, 0, 0, 0])]
)
def test_few_cores_start_one_replica_after_the_other(num_cores: int, waves: list[int]) -> None:
    specs = {
        spec.name: spec.wave
        for spec in cluster_processes(Options(data_parallel_size=4), Path("options.yaml"), num_cores=num_cores)
    }
    assert [specs[f"worker {replica}.0"] for replica in range(4)] == waves
    assert [specs[f"scheduler {replica}"] for replica in range(4)] == waves, "a worker loads when its scheduler says so"
    assert specs["router"] == 0


def test_each_rank_is_a_process_that_starts_along_with_its_replica() -> None:
    options = Options(data_parallel_size=3, tensor_parallel_size=2, metrics_port=9000)
    specs = cluster_processes(options, Path("options.yaml"), num_cores=6)
    workers = [spec for spec in specs if spec.stage is Stage.WORKER]
    assert [spec.name for spec in workers] == [
        "worker 0.0",
        "worker 0.1",
        "worker 1.0",
        "worker 1.1",
        "worker 2.0",
        "worker 2.1",
    ]
    assert [spec.command[-4:] for spec in workers[2:4]] == [
        ("--replica", "1", "--rank", "0"),
        ("--replica", "1", "--rank", "1"),
    ]
    # Three processes a replica, on six cores.
    assert [spec.wave for spec in workers] == [0, 0, 0, 0, 1, 1]
    assert len({spec.health_port for spec in specs}) == len(specs) == 10


def test_each_router_is_a_process_that_knows_which_one_it_is() -> None:
    options = Options(num_routers=2, metrics_port=9000)
    specs = cluster_processes(options, Path("options.yaml"), num_cores=2)
    routers = [spec for spec in specs if spec.stage is Stage.ROUTER]
    assert [(spec.name, spec.command[-2:]) for spec in routers] == [
        ("router 0", ("--router", "0")),
        ("router 1", ("--router", "1")),
    ]
    assert sorted(spec.health_port for spec in specs) == [9000, 9001, 9002, 9003]


def test_processes_of_a_router_share_its_ports_and_none_of_metrics() -> None:
    options = Options(num_routers=2, api_server_count=2, metrics_port=9000)
    specs = cluster_processes(options, Path("options.yaml"), num_cores=2)
    routers = [spec for spec in specs if spec.stage is Stage.ROUTER]
    assert [(spec.name, spec.command[-4:], spec.health_port) for spec in routers] == [
        ("router 0.0", ("--router", "0", "--process", "0"), 9000),
        ("router 0.1", ("--router", "0", "--process", "1"), 9001),
        ("router 1.0", ("--router", "1", "--process", "0"), 9002),
        ("router 1.1", ("--router", "1", "--process", "1"), 9003),
    ]
    assert min(spec.health_port for spec in specs if spec.stage is not Stage.ROUTER) == 9004
