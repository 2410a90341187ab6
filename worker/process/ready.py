"""The message that tells the scheduler what a rank computes."""

from configs import features
from protos import step_pb2
from worker.step.runner import StepRunner


def make_ready(runner: StepRunner, *, epoch: int, rank: int) -> step_pb2.Ready:
    return step_pb2.Ready(
        epoch=epoch,
        rank=rank,
        model=runner.model_info,
        num_swap_blocks=runner.num_swap_blocks,
        features=sorted(features.of_worker(runner.model_info)),
        holds_constrained=runner.holds_constrained,
        drafter=runner.drafter,
        encoder_cache_size=0 if runner.items is None else runner.items.cache_size,
    )
