"""The links between this machine's GPUs, as `nvidia-smi topo -m` prints them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.lab.errors import PlanError
from octavo.lab.nvidia_smi import NvidiaSmiError, nvidia_smi

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)$")
_NVLINK = re.compile(r"NV(\d+)$")
# From nvidia-smi's legend, best first: one PCIe switch; several; the CPU's PCIe bridge; several bridges of a NUMA node;
# the link between NUMA nodes.
PCIE_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """kinds: by pairs of GPU numbers, both orders: NV and the number of links, or one of PCIE_KINDS."""

    num_gpus: int
    kinds: Mapping[tuple[int, int], str]

    @property
    def island_size(self) -> int:
        """GPUs in the smallest group that NVLink connects, each with each; 1: there is no NVLink."""
        return min(len(self._island(gpu)) for gpu in range(self.num_gpus))

    def _island(self, gpu: int) -> set[int]:
        return {gpu} | {other for other in range(self.num_gpus) if _NVLINK.match(self.kinds.get((gpu, other), ""))}

    @property
    def num_nvlinks(self) -> int:
        """NVLinks of the pair in an island that has fewest; 0: there is no NVLink."""
        counts = [int(found[1]) for kind in self.kinds.values() if (found := _NVLINK.match(kind))]
        return min(counts, default=0)

    @property
    def worst_pcie(self) -> str:
        """The longest way between two GPUs without NVLink; empty: all pairs have NVLink."""
        found = [kind for kind in self.kinds.values() if kind in PCIE_KINDS]
        return max(found, key=PCIE_KINDS.index, default="")


def gpu_names() -> list[str]:
    """The driver's names of this machine's GPUs. Raises PlanError if there are none."""
    names = _ask("--query-gpu=name", "--format=csv,noheader").splitlines()
    if len(set(names)) > 1:
        raise PlanError(f"--gpu auto: this machine has several kinds of GPU, {', '.join(sorted(set(names)))}: name one")
    return names


def read_gpu_links() -> GpuLinks:
    """Asks nvidia-smi. Raises PlanError if there is none or it says nothing of GPUs."""
    return parse_topology(_ask("topo", "-m"))


def _ask(*arguments: str) -> str:
    """Raises PlanError."""
    called = f"--gpu auto: nvidia-smi {' '.join(arguments)}"
    try:
        answer = nvidia_smi(*arguments)
    except NvidiaSmiError as error:
        raise PlanError(f"{called}: {error}") from None
    if answer is None:
        raise PlanError("--gpu auto: this machine has no nvidia-smi; name the GPU, and its links with --interconnect")
    if not answer.strip():
        raise PlanError(f"{called}: it prints nothing")
    return answer


def parse_topology(text: str) -> GpuLinks:
    """Parses the matrix of `nvidia-smi topo -m`. Raises PlanError."""
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    # Cells are parted by tabs; a name such as "CPU Affinity" has a space.
    header = next((_cells(line) for line in lines if _GPU.match(_cells(line)[0])), None)
    rows = [_cells(line) for line in lines if line.startswith("GPU")]
    if header is None or not rows:
        raise PlanError(f"--gpu auto: no GPU in the output of nvidia-smi topo -m: {text.strip()[:200]!r}")
    columns = {place: int(found[1]) for place, cell in enumerate(header) if (found := _GPU.match(cell))}
    kinds: dict[tuple[int, int], str] = {}
    for name, *cells in rows:
        found = _GPU.match(name)
        if found is None or len(cells) < len(columns):
            raise PlanError(f"--gpu auto: a row of nvidia-smi topo -m has no cell for each GPU: {[name, *cells]}")
        gpu = int(found[1])
        for place, other in columns.items():
            kind = cells[place]
            if other == gpu:
                continue
            if not _NVLINK.match(kind) and kind not in PCIE_KINDS:
                raise PlanError(f"--gpu auto: GPU{gpu} and GPU{other} have a link of an unknown kind, {kind!r}")
            kinds[gpu, other] = kind
    return GpuLinks(num_gpus=len(rows), kinds=kinds)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().split("\t")]
