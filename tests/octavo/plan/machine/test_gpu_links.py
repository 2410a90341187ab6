"""The links between GPUs: outputs of `nvidia-smi topo -m`, and what a plan makes of them."""

import pytest

from octavo.lab.errors import PlanError
from octavo.plan.costs.hardware import find_gpu, gpu_of_driver, machine_interconnect
from octavo.plan.machine.gpu_links import GpuLinks, parse_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def matrix(rows: list[list[str]], *, nic: bool = False, underlined: bool = False) -> str:
    """As the tool prints it: tabs, spaces around X, and on terminals an underlined header."""
    names = [f"GPU{number}" for number in range(len(rows))] + ["NIC0"] * nic
    header = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{header}\x1b[0m" if underlined else header]
    for number, row in enumerate(rows):
        cells = [*row, *["PIX"] * nic, f"{8 * number}-{8 * number + 7}", str(number // 2), "N/A"]
        lines.append("\t".join([f"GPU{number}", *(" X " if cell == "X" else cell for cell in cells)]))
    if nic:
        lines.append("\t".join(["NIC0", *["PIX"] * len(rows), " X ", "", "", ""]))
    return "\n".join(lines) + "\n" + LEGEND


def links(kinds: dict[frozenset[int], str], num_gpus: int, default: str, **how: bool) -> GpuLinks:
    rows = [
        ["X" if a == b else kinds.get(frozenset((a, b)), default) for b in range(num_gpus)] for a in range(num_gpus)
    ]
    return parse_topology(matrix(rows, **how))


@pytest.mark.parametrize("how", [{}, {"nic": True}, {"underlined": True}, {"nic": True, "underlined": True}])
def test_all_gpus_of_a_host_with_switches_are_one_island(how: dict[str, bool]) -> None:
    found = links({}, 8, "NV18", **how)
    assert (found.num_gpus, found.island_size, found.num_nvlinks, found.worst_pcie) == (8, 8, 18, "")


def test_bridged_pairs_are_islands_of_two() -> None:
    found = links({frozenset((0, 1)): "NV12", frozenset((2, 3)): "NV4"}, 4, "SYS")
    assert (found.island_size, found.num_nvlinks, found.worst_pcie) == (2, 4, "SYS")


def test_gpus_without_nvlink_have_the_longest_way_among_them() -> None:
    found = links({frozenset((0, 1)): "PIX"}, 4, "NODE")
    assert (found.island_size, found.num_nvlinks, found.worst_pcie) == (1, 0, "NODE")


def test_a_lone_gpu_has_no_link() -> None:
    found = links({}, 1, "X")
    assert (found.num_gpus, found.island_size, found.num_nvlinks, found.worst_pcie) == (1, 1, 0, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no GPU in the output"),
        ("No devices were found\n", "No devices were found"),
        (matrix([["X", "NEW"], ["NEW", "X"]]), "GPU0 and GPU1 have a link of an unknown kind, 'NEW'"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "no cell for each GPU"),
    ],
)
def test_an_output_that_is_not_understood_is_an_error(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_topology(text)


def test_links_have_the_rate_of_their_number() -> None:
    gpu = find_gpu("H200")

    def of(found: GpuLinks):
        return machine_interconnect(
            gpu,
            num_gpus=found.num_gpus,
            num_nvlinks=found.num_nvlinks,
            island_size=found.island_size,
            pcie=found.worst_pcie,
        )

    whole = of(links({}, 8, "NV18"))
    assert (whole.within.name, whole.gpus_per_node) == ("nvlink (18 links)", 8)
    assert whole.within.bandwidth == pytest.approx(0.75 * 450e9)
    pairs = of(links({frozenset((0, 1)): "NV9", frozenset((2, 3)): "NV9"}, 4, "SYS"))
    assert pairs.within.bandwidth == pytest.approx(whole.within.bandwidth / 2)
    assert (pairs.link_of(2), pairs.link_of(4)) == (pairs.within, pairs.between)
    near, far = of(links({}, 4, "PIX")), of(links({}, 4, "SYS"))
    assert far.within.bandwidth == near.within.bandwidth / 2 == pairs.between.bandwidth
    assert near.link_of(4).name == "pcie (PIX)"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_drivers_names_are_known(name: str, known: str) -> None:
    assert gpu_of_driver(name).name == known


@pytest.mark.parametrize("name", ["NVIDIA A1000", "Tesla T4", "NVIDIA L40"])
def test_a_gpu_without_a_data_sheet_is_an_error(name: str) -> None:
    with pytest.raises(PlanError, match=f"has '{name}', whose data sheet is not known"):
        gpu_of_driver(name)
