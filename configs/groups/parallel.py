"""Options that distribute a model and its requests over processes, and bind workers to cores."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator

from configs.groups.field import PARALLEL, option, split_commas

# More than any machine has; a typo (0-70000000) must not fill the memory.
_MOST_CORES = 65_536


def parse_core_lists(text: str) -> list[list[int]]:
    """Parses core lists separated by "|"; keeps the order of the cores. Raises ValueError that says what is wrong."""
    lists = [_parse_core_list(part) for part in text.split("|")]
    cores = [core for each in lists for core in each]
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        raise ValueError(f"core {twice[0]} is named twice; each core can run only one thread")
    return lists


def _parse_core_list(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores; write 0-3,8, auto or none")
        low, high = int(first), int(last or first)
        if not low <= high < _MOST_CORES:
            raise ValueError(f"{part.strip()!r} is not a range of cores: give it upwards, below {_MOST_CORES}")
        cores += range(low, high + 1)
    return cores


MOST_STEPS_IN_FLIGHT = 64


def _check_worker_cpus(value: str) -> str:
    if value not in ("none", "auto"):
        parse_core_lists(value)
    return value


def default_steps_in_flight(before: dict[str, Any]) -> int:
    """The default of max_steps_in_flight. before: the options resolved before it, which include all in this file and
    speculative_config."""
    num_stages = before.get("pipeline_parallel_size", 1)
    # Drafts follow the last token, which a step in flight does not tell.
    if num_stages == 1 and before.get("speculative_config") is not None:
        return 1
    return min(num_stages + 1, MOST_STEPS_IN_FLIGHT)


class ParallelOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    data_parallel_size: int = option(
        PARALLEL, 1, "Replicas among which the router balances: schedulers with their own workers.", ge=1, le=1024
    )
    tensor_parallel_size: int = option(
        PARALLEL,
        1,
        "Workers of one replica that share each layer: each has a part of its heads, weights and KV cache, for models "
        "too large for one worker. The number must divide the model's heads.",
        ge=1,
        le=64,
    )
    pipeline_parallel_size: int = option(
        PARALLEL,
        1,
        "Stages of one replica: each has consecutive layers of the model and passes its output on to the next. The "
        "stages compute different steps at the same time.",
        ge=1,
        le=64,
    )
    pipeline_layers: Annotated[tuple[int, ...], BeforeValidator(split_commas)] = option(
        PARALLEL, (), "Number of layers of each stage, comma-separated. Empty: as even as possible."
    )
    enable_expert_parallel: bool = option(
        PARALLEL,
        False,
        "Distribute whole experts of a mixture over all ranks of all replicas, instead of giving each rank a part of "
        "every expert. Replicas then compute their steps together.",
    )
    num_redundant_experts: int = option(
        PARALLEL,
        0,
        "With enable_expert_parallel: slots for copies of experts in each mixture, over all ranks together. The "
        "experts with the most tokens are copied to the ranks with the least work. On CPUs only.",
        ge=0,
        le=65_536,
    )
    eplb_step_interval: int = option(
        PARALLEL,
        3000,
        "Steps after which the copied experts (num_redundant_experts) are chosen again, by each expert's tokens since "
        "the last time.",
        ge=10,
        le=2**31 - 1,
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        PARALLEL,
        "mp",
        "What `octavo up` starts processes with, by vLLM's name. mp: on this machine, itself. ray: on the nodes of a "
        "Ray cluster, as `--on ray`.",
    )
    worker_threads: int = option(
        PARALLEL,
        0,
        "Compute threads of one worker. 0: as many as it has cores in worker_cpus; without these, the cores of the "
        "host or container divided by its workers.",
        ge=0,
        le=1024,
    )
    worker_cpus: Annotated[str, AfterValidator(_check_worker_cpus)] = option(
        PARALLEL,
        "none",
        "Cores that workers' threads are bound to, one thread per core. none: threads are not bound, which is best if "
        "cores are shared. auto: all cores, divided among the host's workers by NUMA node. Or a list such as 0-3,8, "
        "which is divided; or one list per worker, such as 0-15|16-31.",
    )
    heartbeat_timeout: float = option(
        PARALLEL, 10.0, "Seconds of silence after which a worker or a scheduler counts as dead.", gt=0, le=3600
    )
    step_timeout: float = option(
        PARALLEL,
        300.0,
        "Seconds after which a step without a result counts as failed. Its worker ends itself up to 10 s later.",
        gt=0,
        le=86_400,
    )
    hang_timeout: float = option(
        PARALLEL,
        20.0,
        "Seconds without progress after which a process that has started counts as hung. It ends itself if one of its "
        "loops stands still (a step has step_timeout), or `octavo up` kills it if it is stopped or stuck as a whole; "
        "then it is replaced.",
        ge=1,
        le=86_400,
    )
    max_restarts: int = option(
        PARALLEL,
        5,
        "Times within a minute that `octavo up` restarts a process. After one more death it stops the whole replica "
        "for a while (max_quarantine), and the others go on.",
        ge=0,
        le=1000,
    )
    max_quarantine: float = option(
        PARALLEL,
        960.0,
        "Most seconds for which `octavo up` stops a replica that fails again and again before it tries it once more: "
        "60 the first time, then twice as long each time.",
        gt=0,
        le=86_400,
    )
    no_replica_timeout: float = option(
        PARALLEL,
        300.0,
        "Seconds without any replica, because all fail again and again, after which `octavo up` ends. An LLM ends at "
        "once if this is not given. Before anything has served, a failure ends both at once.",
        ge=0,
        le=86_400,
    )

    def _check_parallel(self) -> None:
        """Raises ValueError."""
        counts, num_stages = self.pipeline_layers, self.pipeline_parallel_size
        if counts and (len(counts) != num_stages or min(counts) < 1):
            raise ValueError(
                f"pipeline_layers={','.join(map(str, counts))} with pipeline_parallel_size={num_stages}: give one "
                f"number of 1 or more for each stage, or none at all"
            )
        if self.num_redundant_experts and not self.enable_expert_parallel:
            raise ValueError(
                f"num_redundant_experts={self.num_redundant_experts} needs enable_expert_parallel: without it each "
                "worker has a part of every expert"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks of one replica: its workers, numbered from 0."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def in_lockstep(self) -> bool:
        """True if all replicas compute each step at the same time, because each has experts that the others need."""
        return self.enable_expert_parallel and self.data_parallel_size > 1
