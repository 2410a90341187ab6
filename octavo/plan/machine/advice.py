"""Tensor or pipeline parallelism: which to take over given links, and why, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.plan.costs.hardware import Gpu, Interconnect
from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.costs.roofline import ALL_REDUCE, STAGES, Placement, Roofline
from octavo.plan.costs.step_shape import StepShape
from octavo.plan.machine.cpu_nodes import CpuNodes

# Two splits whose tokens/s differ by less are equal: then the one that gives a token sooner is taken.
_EQUAL = 0.1
_GIB = 2**30
_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One replica's decode steps over all its GPUs. token_seconds: from a sequence's token to its next one.
    link_seconds: the part of it in which ranks exchange data."""

    name: str
    link: str
    token_seconds: float
    tokens_per_second: float
    link_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name} over {self.link}: a token every {self.token_seconds * 1e3:.3g} ms, of which the links take "
            f"{self.link_seconds * 1e3:.2g} ms ({self.link_seconds / self.token_seconds:.0%}); "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAdvice:
    """splits: those that the model allows, tensor parallelism first. take: the one to take, and why."""

    splits: Sequence[Split]
    take: str
    reason: str


def gpu_advice(
    model: ModelShape, gpu: Gpu, interconnect: Interconnect, num_gpus: int, *, num_rows: int, context: int
) -> GpuAdvice:
    """Compares TP, PP and TP within hosts or NVLink islands with PP between them, for decode steps.

    num_rows: sequences that decode at once, in the whole replica; context: tokens that each of them reads.
    """
    group = min(interconnect.gpus_per_node, num_gpus)
    pairs = {(num_gpus, 1), (1, num_gpus)}
    if num_gpus % group == 0:
        pairs.add((group, num_gpus // group))
    possible = [
        _split(model, gpu, interconnect, tensor, stages, num_rows, context)
        for tensor, stages in sorted(pairs, reverse=True)
        if model.divides_among(tensor) and stages <= model.num_layers
    ]
    most = max(each.tokens_per_second for each in possible)
    near = [each for each in possible if each.tokens_per_second >= (1 - _EQUAL) * most]
    best = min(near, key=lambda each: each.token_seconds)
    others = [each for each in possible if each is not best]
    reasons = [
        f"{best.tokens_per_second / each.tokens_per_second:.2f} x the tokens/s of {each.name} and a token in "
        f"{best.token_seconds / each.token_seconds:.2f} of its time"
        for each in others
    ]
    return GpuAdvice(splits=possible, take=best.name, reason="; ".join(reasons) or "no other split is possible")


def _split(
    model: ModelShape, gpu: Gpu, interconnect: Interconnect, tensor: int, stages: int, num_rows: int, context: int
) -> Split:
    placement = Placement(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    cost = Roofline(model=model, gpu=gpu, placement=placement, interconnect=interconnect, block_size=16)
    # Stages work on different steps, each with its share of the rows.
    rows = max(1, -(-num_rows // stages))
    shape = StepShape(rows, 0, 0, rows, rows * context, 0, 0)
    seconds = dict(zip(cost.parts, cost.stage_seconds(shape), strict=True))
    stage = sum(seconds.values())
    within = interconnect.link_of(tensor).name if tensor > 1 else ""
    between = interconnect.link_of(tensor * stages).name if stages > 1 else ""
    return Split(
        name=" x ".join(f"{kind} {count}" for kind, count in (("TP", tensor), ("PP", stages)) if count > 1) or "TP 1",
        link=" and ".join(filter(None, (within, between))) or "no link",
        token_seconds=stage * stages,
        tokens_per_second=rows / stage,
        link_seconds=stages * (seconds[ALL_REDUCE] + seconds[STAGES]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAdvice:
    """take: options of `octavo up`. reasons: why, in numbers."""

    take: str
    reasons: Sequence[str]


def cpu_advice(model: ModelShape, nodes: CpuNodes) -> CpuAdvice:
    """Divides a model over NUMA nodes."""
    count, weights, node_bytes = nodes.num_nodes, model.weight_bytes, min(nodes.memory)
    size = f"{weights / _GIB:.2f} GiB of weights, {node_bytes / _GIB:.1f} GiB of memory in a node"
    if count == 1:
        if weights > node_bytes:
            size = f"{size}: they do not fit, with any split; use quantization, or more machines"
        return CpuAdvice(
            take="--tensor-parallel-size 1 --pipeline-parallel-size 1",
            reasons=[
                f"one NUMA node: TP and PP would share the same {len(nodes.cores[0])} hardware threads and the same "
                f"memory, and add {2 * model.num_layers} gathers a step (TP) or wait for one another (PP)",
                size,
            ],
        )
    far = f"another node's memory takes up to {nodes.longest_way:.1f} times as long to read as the own one's"
    gathered = 2 * model.num_layers * model.hidden_size * _BYTES * (count - 1) / count
    traffic = (
        f"for each token TP {count} moves {gathered / 2**10:.0f} KiB between nodes, in {2 * model.num_layers} gathers; "
        f"PP {count} moves {model.hidden_size * _BYTES * (count - 1) / 2**10:.0f} KiB in {count - 1} messages"
    )
    # Half of a node's memory is left to the KV cache and everything else.
    if weights <= node_bytes / 2:
        return CpuAdvice(
            take=f"--data-parallel-size {count} --worker-cpus auto",
            reasons=[f"{size}: each node has a whole replica, and no step leaves it", far, traffic],
        )
    if model.divides_among(count):
        return CpuAdvice(
            take=f"--tensor-parallel-size {count} --worker-cpus auto",
            reasons=[
                f"{size}: a replica needs several nodes; each reads {weights / count / _GIB:.2f} GiB a step from its "
                f"own memory, all at once, where PP would read them one after the other for the same token",
                far,
                traffic,
            ],
        )
    return CpuAdvice(
        take=f"--pipeline-parallel-size {count} --worker-cpus auto",
        reasons=[f"{size}: a replica needs several nodes, and {count} does not divide its heads", far, traffic],
    )
