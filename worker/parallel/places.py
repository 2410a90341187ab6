"""What a rank computes, by the options."""

from configs.options import Options
from kernels.shard import NOT_SHARED, ExpertShard, Shard, Stage
from worker.parallel.axes import Axes


def axes_of(options: Options) -> Axes:
    return Axes(
        tensor_size=options.tensor_parallel_size,
        pipeline_size=options.pipeline_parallel_size,
        data_size=options.data_parallel_size if options.in_lockstep else 1,
    )


def shard_of(options: Options, rank: int) -> Shard:
    """What a rank computes of each layer of its stage."""
    axes = axes_of(options)
    return Shard(axes.tensor_rank(rank), axes.tensor_size)


def experts_of(options: Options, rank: int, replica: int = 0) -> ExpertShard:
    """Which of the whole experts of a mixture a rank has; all of one, if each expert is cut as all layers are."""
    axes = axes_of(options)
    if not options.enable_expert_parallel:
        return NOT_SHARED
    members = axes.expert_group(rank)
    return ExpertShard(
        members.index(axes.global_rank(rank, replica if axes.data_size > 1 else 0)),
        len(members),
        options.num_redundant_experts,
        options.eplb_step_interval,
    )


def stage_of(options: Options, rank: int) -> Stage:
    """Which layers a rank computes."""
    axes = axes_of(options)
    return Stage(axes.stage(rank), axes.pipeline_size, options.pipeline_layers)
