"""Known GPUs, with the dense rates of their data sheets, and the links between them."""

import difflib
import re
from dataclasses import dataclass

from octavo.lab.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. Bytes and bytes/s are decimal, as on a data sheet."""

    name: str
    memory: float
    # Bytes/s of its memory.
    bandwidth: float
    # FLOP/s of the matrix units, accumulating in float32. fp8 is None on GPUs without fp8 units.
    bf16_flops: float
    fp8_flops: float | None
    # NVLink (or similar) bytes/s in one direction, to all other GPUs of the host; None: no such link.
    link: float | None
    # PCIe bytes/s in one direction.
    pcie: float


def _gpu(name: str, gb: float, gb_s: float, bf16: float, fp8: float | None, link: float | None, pcie: float) -> Gpu:
    """gb, gb_s: memory; bf16, fp8: TFLOP/s; link, pcie: GB/s in one direction (half of a data sheet's sum)."""
    return Gpu(
        name=name,
        memory=gb * 1e9,
        bandwidth=gb_s * 1e9,
        bf16_flops=bf16 * 1e12,
        fp8_flops=fp8 and fp8 * 1e12,
        link=link and link * 1e9,
        pcie=pcie * 1e9,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 180, 7700, 2250, 4500, 900, 64),
        _gpu("H200", 141, 4800, 989, 1979, 450, 64),
        _gpu("H100 SXM", 80, 3350, 989, 1979, 450, 64),
        _gpu("H100 NVL", 94, 3900, 835, 1671, 300, 64),
        _gpu("H100 PCIe", 80, 2000, 756, 1513, 300, 64),
        _gpu("A100 80GB", 80, 2039, 312, None, 300, 32),
        _gpu("A100 40GB", 40, 1555, 312, None, 300, 32),
        _gpu("L40S", 48, 864, 362, 733, None, 32),
        _gpu("L4", 24, 300, 121, 242, None, 32),
        _gpu("A10", 24, 600, 125, None, None, 32),
        _gpu("RTX 6000 Ada", 48, 960, 364, 728, None, 32),
        _gpu("RTX 5090", 32, 1792, 209, 419, None, 64),
        _gpu("RTX 4090", 24, 1008, 165, 330, None, 32),
        _gpu("RTX 3090", 24, 936, 71, None, 56, 32),
        _gpu("MI300X", 192, 5300, 1307, 2615, 448, 64),
        _gpu("MI325X", 256, 6000, 1307, 2615, 448, 64),
        _gpu("MI355X", 288, 8000, 2300, 4600, 538, 64),
    )
}
# Other common names.
_ALIASES = {"h100": "H100 SXM", "a100": "A100 80GB", "4090": "RTX 4090", "5090": "RTX 5090", "3090": "RTX 3090"}


def find_gpu(name: str) -> Gpu:
    """Finds a GPU by name, ignoring case, spaces and dashes. Raises PlanError, which lists the known GPUs."""

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    by_plain_name = {plain(known): gpu for known, gpu in GPUS.items()}
    by_plain_name |= {alias: GPUS[known] for alias, known in _ALIASES.items()}
    if found := by_plain_name.get(plain(name)):
        return found
    close = difflib.get_close_matches(plain(name), by_plain_name, n=1)
    hint = f" (did you mean {by_plain_name[close[0]].name}?)" if close else ""
    raise PlanError(f"--gpu {name!r} is not known{hint}; known are {', '.join(GPUS)}")


# The GPU by what is in nvidia-smi's name of it, the first that fits: its own name, or a form without one.
_IN_NAMES = {
    **{name: name for name in GPUS},
    "H100": "H100 SXM",
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100": "A100 80GB",
}


def gpu_of_driver(name: str) -> Gpu:
    """Finds the GPU that nvidia-smi calls so, such as "NVIDIA H100 80GB HBM3". Raises PlanError."""
    for part, known in _IN_NAMES.items():
        if re.search(rf"\b{re.escape(part)}\b", name):
            return GPUS[known]
    raise PlanError(
        f"--gpu auto: this machine has {name!r}, whose data sheet is not known; known are {', '.join(GPUS)}"
    )


# Share of a link's data-sheet rate that a large collective reaches.
_EFFICIENCY = 0.75
# Seconds for a small message from one GPU to the next within a collective, including its kernel's start.
_LATENCY = {"nvlink": 3e-6, "pcie": 7e-6, "net": 12e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """name: for people. bandwidth: usable bytes/s that one GPU sends. latency: seconds for a small message."""

    name: str
    bandwidth: float
    latency: float

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Time of one all-reduce: a ring's traffic plus a tree's latency (NCCL picks the better one)."""
        if num_ranks == 1:
            return 0.0
        hops = 2 * (num_ranks - 1).bit_length()
        return hops * self.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth

    def send_seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """Hosts of gpus_per_node GPUs each; `within` connects the GPUs of one host, `between` connects hosts."""

    within: Link
    between: Link
    gpus_per_node: int

    def link_of(self, num_ranks: int) -> Link:
        """The slowest link among `num_ranks` neighbouring ranks."""
        return self.within if num_ranks <= self.gpus_per_node else self.between


def parse_interconnect(text: str, gpu: Gpu, gpus_per_node: int) -> Interconnect:
    """Parses KIND, or KIND,KIND for links within a host and between hosts. KIND: nvlink, pcie or net:GBIT (per GPU).

    A single kind connects all GPUs. Raises PlanError.
    """
    kinds = text.split(",")
    if len(kinds) > 2:
        raise PlanError(f"--interconnect={text!r}: give one kind, or two for within a host and between hosts")
    links = [_parse_link(kind.strip(), gpu) for kind in kinds]
    return Interconnect(within=links[0], between=links[-1], gpus_per_node=gpus_per_node)


def default_interconnect(gpu: Gpu) -> str:
    """The GPU's fastest kind of link."""
    return "nvlink" if gpu.link else "pcie"


# NVLinks of a GPU by the rate of all of them together.
_NUM_NVLINKS = {900e9: 18, 450e9: 18, 300e9: 12, 56e9: 4}
# Share of PCIe's rate between two sockets, through both hosts' memory [est].
_ACROSS_SOCKETS = 0.5


def machine_interconnect(gpu: Gpu, *, num_gpus: int, num_nvlinks: int, island_size: int, pcie: str) -> Interconnect:
    """The links of one host, as nvidia-smi tells them.

    num_nvlinks: of a pair with NVLink; 0: there is none. island_size: GPUs that NVLink connects, each with each. pcie:
    nvidia-smi's name of the longest way between GPUs without NVLink, such as SYS.
    """
    rate = gpu.pcie * (_ACROSS_SOCKETS if pcie == "SYS" else 1.0)
    over_pcie = _link(f"pcie ({pcie})", rate, "pcie")
    if not num_nvlinks or gpu.link is None:
        return Interconnect(within=over_pcie, between=over_pcie, gpus_per_node=num_gpus)
    share = min(1.0, num_nvlinks / _NUM_NVLINKS[gpu.link])
    nvlink = _link(f"nvlink ({num_nvlinks} links)", gpu.link * share, "nvlink")
    return Interconnect(within=nvlink, between=over_pcie if pcie else nvlink, gpus_per_node=island_size)


def _parse_link(text: str, gpu: Gpu) -> Link:
    kind, _, rate = text.partition(":")
    if kind == "nvlink" and not rate:
        if gpu.link is None:
            raise PlanError(f"--interconnect=nvlink: the {gpu.name} has no NVLink; use pcie or net:GBIT")
        return _link("nvlink", gpu.link, "nvlink")
    if kind == "pcie" and not rate:
        return _link("pcie", gpu.pcie, "pcie")
    if kind == "net":
        try:
            gbit = float(rate)
        except ValueError:
            gbit = 0.0
        if 0 < gbit < 1e6:
            # Traffic that leaves a host also passes PCIe.
            return _link(text, min(gbit * 1e9 / 8, gpu.pcie), "net")
        raise PlanError(f"--interconnect={text!r}: net needs a rate in Gbit/s per GPU, such as net:400")
    raise PlanError(f"--interconnect={text!r} is not known; use nvlink, pcie, net:GBIT or two of them with a comma")


def _link(name: str, bandwidth: float, kind: str) -> Link:
    return Link(name=name, bandwidth=bandwidth * _EFFICIENCY, latency=_LATENCY[kind])
