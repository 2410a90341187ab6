"""Options that share a model and its requests among processes, and bind workers to cores."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator

from configs.groups.field import PARALLEL, option, split_commas

# A machine has fewer; a slip of the keyboard (0-70000000) should not take memory.
_MOST_CORES = 65_536


def parse_core_lists(text: str) -> list[list[int]]:
    """The cores of each list, in the order given. Raises ValueError, saying what is wrong."""
    lists = [_parse_core_list(part) for part in text.split("|")]
    cores = [core for each in lists for core in each]
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        raise ValueError(f"core {twice[0]} is named twice; each can compute for one thread")
    return lists


def _parse_core_list(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores; write 0-3,8, auto or none")
        low, high = int(first), int(last or first)
        if not low <= high < _MOST_CORES:
            raise ValueError(f"{part.strip()!r} is no range of cores: it runs upwards, below {_MOST_CORES}")
        cores += range(low, high + 1)
    return cores


MOST_STEPS_IN_FLIGHT = 64


def _check_worker_cpus(value: str) -> str:
    if value not in ("none", "auto"):
        parse_core_lists(value)
    return value


def default_steps_in_flight(before: dict[str, Any]) -> int:
    """before: the options that are resolved before max_steps_in_flight is, as these are."""
    num_stages = before.get("pipeline_parallel_size", 1)
    return 1 if num_stages == 1 else min(num_stages + 1, MOST_STEPS_IN_FLIGHT)


class ParallelOptions(BaseModel):
    """Validated with the others, in configs.options."""

    data_parallel_size: int = option(
        PARALLEL, 1, "Replicas: schedulers with their own workers, between which the router balances.", ge=1, le=1024
    )
    tensor_parallel_size: int = option(
        PARALLEL,
        1,
        "Workers of one replica that share each layer: each has a part of its heads, weights and KV cache, for models "
        "too large for one worker. Has to divide the model's heads.",
        ge=1,
        le=64,
    )
    pipeline_parallel_size: int = option(
        PARALLEL,
        1,
        "Stages of one replica: each has a run of the model's layers, and passes on what it computes. While one is at "
        "a step, the others are at others.",
        ge=1,
        le=64,
    )
    pipeline_layers: Annotated[tuple[int, ...], BeforeValidator(split_commas)] = option(
        PARALLEL, (), "Layers of each stage, comma-separated. Empty: as even as they can be."
    )
    enable_expert_parallel: bool = option(
        PARALLEL,
        False,
        "Ranks hold whole experts of a mixture, dealt out over all ranks of all replicas, in place of a part of each. "
        "Replicas then compute their steps together.",
    )
    num_redundant_experts: int = option(
        PARALLEL,
        0,
        "With enable_expert_parallel: slots for copies of experts, in each mixture, at all ranks together. The experts "
        "with the most tokens are copied to the ranks with the least to do. On CPUs only.",
        ge=0,
        le=65_536,
    )
    eplb_step_interval: int = option(
        PARALLEL,
        3000,
        "Steps after which num_redundant_experts are chosen anew, by the tokens of each expert since the last time.",
        ge=10,
        le=2**31 - 1,
    )
    worker_threads: int = option(
        PARALLEL,
        0,
        "Compute threads of one worker. 0: as many as it has cores in worker_cpus; without these, the host's cores, or "
        "what a container may use of them, over its workers.",
        ge=0,
        le=1024,
    )
    worker_cpus: Annotated[str, AfterValidator(_check_worker_cpus)] = option(
        PARALLEL,
        "none",
        "Cores that workers' threads are bound to, one each. none: the system puts them anywhere, as is best where "
        "cores are shared. auto: all cores, dealt out to the host's workers by NUMA node. Or a list, 0-3,8, that is "
        "dealt out; or one for each worker, 0-15|16-31.",
    )
    heartbeat_timeout: float = option(
        PARALLEL, 10.0, "Seconds of silence after which a worker or a scheduler counts as dead.", gt=0, le=3600
    )
    step_timeout: float = option(
        PARALLEL,
        300.0,
        "Seconds after which a step that has not returned counts as failed. Its worker ends itself up to 10 s later.",
        gt=0,
        le=86_400,
    )
    max_restarts: int = option(
        PARALLEL, 5, "Times within a minute that `octavo up` starts a process again before it gives up.", ge=0, le=1000
    )

    def _check_parallel(self) -> None:
        """Raises ValueError."""
        counts, num_stages = self.pipeline_layers, self.pipeline_parallel_size
        if counts and (len(counts) != num_stages or min(counts) < 1):
            raise ValueError(
                f"pipeline_layers={','.join(map(str, counts))} with pipeline_parallel_size={num_stages}: give one "
                f"number for each stage, of 1 or more, or none at all"
            )
        if self.num_redundant_experts and not self.enable_expert_parallel:
            raise ValueError(
                f"num_redundant_experts={self.num_redundant_experts} needs enable_expert_parallel: without it each "
                "worker has a part of every expert"
            )

    @property
    def world_size(self) -> int:
        """Ranks of one replica: its workers, numbered from 0."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def in_lockstep(self) -> bool:
        """All replicas compute each step at the same time, for each has experts that the others need."""
        return self.enable_expert_parallel and self.data_parallel_size > 1
