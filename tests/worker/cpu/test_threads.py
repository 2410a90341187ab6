"""Cores and threads of workers: which worker gets which from worker_cpus, and how many a container leaves."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.groups.parallel import parse_core_lists
from configs.load import ConfigError, load_options
from configs.options import Options
from kernels.native import cores as cores_module
from worker.cpu.threads import prepare_threads
from worker.errors import PermanentError


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Restores this process's cores and its number of threads after the test."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("text", "lists"),
    [("0", [[0]]), ("0-3,8", [[0, 1, 2, 3, 8]]), ("0-1|2-3", [[0, 1], [2, 3]]), (" 5 , 2-3 ", [[5, 2, 3]])],
)
def test_lists_of_cores(text: str, lists: list[list[int]]) -> None:
    assert parse_core_lists(text) == lists


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither a core nor a range"),
        ("all", "neither a core nor a range"),
        ("0-", "neither a core nor a range"),
        ("3-1", "give it upwards"),
        ("0-99999999", "below 65536"),
        ("0-2|2", "core 2 is named twice"),
    ],
)
def test_what_is_no_list_of_cores_is_told_with_the_option(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"worker_cpus={text!r}.*{said}"):
        load_options(None, {"worker_cpus": text}, {})


def _dealt(usable: set[int], options: Options, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The cores that each worker of a cluster gets on a machine with these usable cores."""
    asked: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(list(cores)))
    ranks = itertools.product(range(options.data_parallel_size), range(options.world_size))
    dealt = [prepare_threads(options, replica, rank) for replica, rank in ranks]
    assert asked == [cores for cores in dealt if cores]
    return dealt


@pytest.mark.parametrize(
    ("worker_cpus", "dealt"),
    [
        ("none", [[], []]),
        ("auto", [[0, 1, 2], [4, 5, 6, 7]]),
        ("4-7", [[4, 5], [6, 7]]),
        ("0,1,7", [[0], [1, 7]]),
        ("7|0-2", [[7], [0, 1, 2]]),
    ],
)
def test_workers_get_cores_of_their_own(
    worker_cpus: str, dealt: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "_nodes", lambda directory: [])
    options = Options(worker_cpus=worker_cpus, data_parallel_size=2)
    assert _dealt({0, 1, 2, 4, 5, 6, 7}, options, monkeypatch) == dealt


def test_ranks_of_a_replica_share_what_it_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "cpu_quota", lambda directories: None)
    options = Options(worker_cpus="0-7", data_parallel_size=2, tensor_parallel_size=2)
    assert _dealt(set(range(8)), options, monkeypatch) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    _dealt(set(range(8)), Options(data_parallel_size=2, tensor_parallel_size=2), monkeypatch)
    assert torch.get_num_threads() == 2


def test_auto_keeps_a_worker_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hyper-threads are numbered after all cores, cores with adjacent numbers may lie on different nodes."""
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(cores_module, "_NODES", tmp_path)
    options = Options(worker_cpus="auto", data_parallel_size=2)
    assert _dealt(set(range(8)), options, monkeypatch) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("worker_cpus", "replicas", "said"),
    [
        ("0,5", 1, r"worker_cpus='0,5'.* not run on core 5; it may run on 0, 1$"),
        ("auto", 3, "2 cores are too few for 3 workers"),
        ("0", 2, "1 cores are too few for 2 workers"),
        ("0|1", 1, "2 lists of cores for 1 workers"),
    ],
)
def test_cores_that_cannot_be_had_end_the_worker_with_the_option(
    worker_cpus: str, replicas: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(worker_cpus=worker_cpus, data_parallel_size=replicas)
    with pytest.raises(PermanentError, match=said):
        _dealt({0, 1}, options, monkeypatch)


def test_threads_are_as_many_as_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "cpu_quota", lambda directories: None)
    _dealt({0, 1, 2}, Options(worker_cpus="0,2"), monkeypatch)
    assert torch.get_num_threads() == 2
    _dealt({0, 1, 2}, Options(), monkeypatch)
    assert torch.get_num_threads() == 3
    _dealt({0, 1, 2}, Options(worker_cpus="0,2", worker_threads=4), monkeypatch)
    assert torch.get_num_threads() == 4


def test_a_containers_bound_on_cpu_time_bounds_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads with the CPU time of two and a half cores would stand still for two thirds of every period."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores_module, "cpu_quota", lambda directories: 2.5)
    prepare_threads(Options())
    assert torch.get_num_threads() == 3
    prepare_threads(Options(data_parallel_size=2))
    assert torch.get_num_threads() == 1


def test_quotas_of_both_versions_of_control_groups(tmp_path: Path) -> None:
    inner, outer, old, none = (tmp_path / name for name in ("inner", "outer", "old", "none"))
    for directory in (inner, outer, old, none):
        directory.mkdir()
    (inner / "cpu.max").write_text("max 100000\n")
    (outer / "cpu.max").write_text("150000 100000\n")
    (old / "cpu.cfs_quota_us").write_text("400000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cores_module.cpu_quota([inner, outer, none]) == 1.5
    assert cores_module.cpu_quota([old]) == 4
    assert cores_module.cpu_quota([inner, none]) is None
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores_module.cpu_quota([old]) is None


def test_this_processs_control_groups_can_be_read() -> None:
    assert 1 <= cores_module.num_usable_cores() <= len(os.sched_getaffinity(0))
