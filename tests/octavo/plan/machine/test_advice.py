"""Tensor or pipeline parallelism: the advice follows from the links, the sizes and the nodes."""

from pathlib import Path

import pytest

from octavo.plan.costs.hardware import find_gpu, machine_interconnect, parse_interconnect
from octavo.plan.costs.model_shape import ModelShape, read_shape
from octavo.plan.machine.advice import cpu_advice, gpu_advice
from octavo.plan.machine.answers import LARGEST_PAGE, SMALLEST_PAGE, page_size, plan_pages
from octavo.plan.machine.cpu_nodes import CpuNodes, read_cpu_nodes
from tests.support.repository import ROOT

MODELS = ROOT / "configs" / "models"
GIB = 2**30


@pytest.fixture(scope="module")
def large() -> ModelShape:
    return read_shape(str(MODELS / "llama-3.1-70b.json"))


def test_a_fast_link_is_for_tensors_and_a_slow_one_for_stages(large: ModelShape) -> None:
    gpu = find_gpu("H100")

    def take(links: str) -> str:
        return gpu_advice(large, gpu, parse_interconnect(links, gpu, 8), 8, num_rows=256, context=1000).take

    assert take("nvlink") == "TP 8"
    assert take("net:1") == "PP 8"


def test_islands_of_nvlink_have_tensors_within_and_stages_between(large: ModelShape) -> None:
    gpu = find_gpu("A100")
    links = machine_interconnect(gpu, num_gpus=8, num_nvlinks=12, island_size=4, pcie="SYS")
    advice = gpu_advice(large, gpu, links, 8, num_rows=256, context=1000)
    assert [split.name for split in advice.splits] == ["TP 8", "TP 4 x PP 2", "PP 8"]
    assert advice.take == "TP 4 x PP 2"
    mixed = advice.splits[1]
    assert mixed.link == "nvlink (12 links) and pcie (SYS)"
    assert 0 < mixed.link_seconds < mixed.token_seconds
    # Over PCIe the all-reduces of eight ranks alone take longer than all else.
    assert advice.splits[0].link_seconds > 0.5 * advice.splits[0].token_seconds
    assert f"{mixed.tokens_per_second / advice.splits[0].tokens_per_second:.2f} x the tokens/s of TP 8" in advice.reason


def test_splits_that_do_not_divide_the_model_are_no_choice(large: ModelShape) -> None:
    gpu = find_gpu("H100")
    advice = gpu_advice(large, gpu, parse_interconnect("nvlink", gpu, 8), 3, num_rows=8, context=100)
    assert (advice.take, advice.reason) == ("PP 3", "no other split is possible")


def nodes(count: int, *, gib: int = 256) -> CpuNodes:
    distances = [[10 if a == b else 21 for b in range(count)] for a in range(count)]
    cores = [range(32 * node, 32 * node + 32) for node in range(count)]
    return CpuNodes(
        num_sockets=count, num_cores=32 * count, cores=cores, distances=distances, memory=[gib * GIB] * count
    )


def test_a_model_that_fits_a_node_has_a_replica_on_each(large: ModelShape) -> None:
    advice = cpu_advice(large, nodes(2, gib=512))
    assert advice.take == "--data-parallel-size 2 --worker-cpus auto"
    assert "2.1 times as long" in advice.reasons[1]


def test_a_larger_one_is_divided_by_tensors_where_its_heads_allow(large: ModelShape) -> None:
    assert cpu_advice(large, nodes(2, gib=160)).take == "--tensor-parallel-size 2 --worker-cpus auto"
    assert "65.7" in cpu_advice(large, nodes(2, gib=160)).reasons[0]
    assert cpu_advice(large, nodes(3, gib=96)).take == "--pipeline-parallel-size 3 --worker-cpus auto"


def test_one_node_is_not_divided(large: ModelShape) -> None:
    advice = cpu_advice(large, nodes(1, gib=64))
    assert advice.take == "--tensor-parallel-size 1 --pipeline-parallel-size 1"
    assert "do not fit" in advice.reasons[1]


def test_nodes_and_sockets_are_read_from_sys(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        # Two sockets of two cores with two threads each.
        (topology / "physical_package_id").write_text(f"{cpu // 4}\n")
        (topology / "core_id").write_text(f"{cpu // 2}\n")
    for node, (cores, distance) in enumerate([("0-3", "10 21 30"), ("4-7", "21 10 30"), ("", "30 30 10")]):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "distance").write_text(f"{distance}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       1048576 kB\nNode {node} MemFree: 1 kB\n")
    found = read_cpu_nodes(tmp_path)
    assert (found.num_sockets, found.num_cores, found.num_nodes) == (2, 4, 2)
    assert [list(each) for each in found.cores] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.longest_way == 3.0
    assert list(found.memory) == [GIB, GIB]


def test_a_machine_without_nodes_is_one(tmp_path: Path) -> None:
    (tmp_path / "cpu/cpu0/topology").mkdir(parents=True)
    found = read_cpu_nodes(tmp_path)
    assert (found.num_sockets, found.num_nodes, list(found.cores[0])) == (1, 1, [0])
    assert found.memory[0] > 0


def test_pages_of_all_lengths_follow_the_rule() -> None:
    """From 1 to 2^20: a power of two, between 16 and 256, the smallest that is at least a 16th of the length."""
    before = 0
    for length in range(1, 2**20 + 1):
        size = page_size(length)
        assert size >= before, length
        if size != before:
            assert size in (16, 32, 64, 128, 256), (length, size)
            # Up to the length before, half as much was a 16th of it; the first one has the least.
            assert before == 0 or length == 16 * before + 1, (length, size)
        before = size
    assert (page_size(1), page_size(256), page_size(257)) == (SMALLEST_PAGE, 16, 32)
    assert (page_size(2048), page_size(2049), page_size(2**20)) == (128, 256, LARGEST_PAGE)
    with pytest.raises(ValueError, match="max_model_len=0"):
        page_size(0)


def test_block_tables_must_fit_into_scalar_memory() -> None:
    fitting = plan_pages(131_072, 256)
    assert (fitting.size, fitting.num_pages, fitting.tables_fit) == (256, 512, True)
    larger = plan_pages(131_072, 257)
    assert (larger.tables_fit, larger.most_seqs) == (False, 256)
