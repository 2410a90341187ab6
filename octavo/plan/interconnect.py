"""What connects GPUs: bytes a second and latency, within a host and between hosts."""

from dataclasses import dataclass

from octavo.plan.errors import PlanError
from octavo.plan.gpus import Gpu

# Share of a link's data-sheet rate that a large collective reaches.
_EFFICIENCY = 0.75
# Seconds for a small message from one GPU to the next, as collectives see it, with the start of their kernels.
_LATENCY = {"nvlink": 3e-6, "pcie": 7e-6, "net": 12e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """name: for people. bandwidth: bytes a second that one GPU sends, usable. latency: seconds of a small message."""

    name: str
    bandwidth: float
    latency: float

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """One all-reduce of so many bytes: a ring's traffic, and a tree's latency (NCCL picks the better one)."""
        if num_ranks == 1:
            return 0.0
        hops = 2 * (num_ranks - 1).bit_length()
        return hops * self.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth

    def send_seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """Hosts of gpus_per_node GPUs each; `within` connects those of one host, `between` the hosts."""

    within: Link
    between: Link
    gpus_per_node: int

    def link_of(self, num_ranks: int) -> Link:
        """The slowest link that so many neighbouring ranks need."""
        return self.within if num_ranks <= self.gpus_per_node else self.between


def parse_interconnect(text: str, gpu: Gpu, gpus_per_node: int) -> Interconnect:
    """KIND, or KIND,KIND for links within a host and between hosts. KIND: nvlink, pcie or net:GBIT (per GPU).

    One kind alone connects all. Raises PlanError.
    """
    kinds = text.split(",")
    if len(kinds) > 2:
        raise PlanError(f"--interconnect={text!r}: give one kind, or two for within a host and between hosts")
    links = [_parse_link(kind.strip(), gpu) for kind in kinds]
    return Interconnect(within=links[0], between=links[-1], gpus_per_node=gpus_per_node)


def default_interconnect(gpu: Gpu) -> str:
    """The fastest that the GPU has."""
    return "nvlink" if gpu.link else "pcie"


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
            # What leaves a host goes through its PCIe as well.
            return _link(text, min(gbit * 1e9 / 8, gpu.pcie), "net")
        raise PlanError(f"--interconnect={text!r}: net needs a rate in Gbit/s for each GPU, such as net:400")
    raise PlanError(f"--interconnect={text!r} is not known; use nvlink, pcie, net:GBIT or two of them with a comma")


def _link(name: str, bandwidth: float, kind: str) -> Link:
    return Link(name=name, bandwidth=bandwidth * _EFFICIENCY, latency=_LATENCY[kind])
