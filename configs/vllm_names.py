"""vLLM's options of process groups that have no option here: their names, and what to use instead.

A value that asks for nothing beyond one machine (nnodes=1) is taken, because commands and files written for vLLM have
it. Every other one is refused by name: a cluster that silently left a machine out would be worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from configs.programs import module_of

_SCHEDULER, _WORKER = (f"python -m {module_of(kind)}" for kind in ("scheduler", "worker"))
_MACHINES = (
    "each machine starts its own processes, and they find each other by scheduler_addresses, step_addresses and "
    "curve_dir (docs/operations.md, Several machines); or one command starts all of them on a Ray cluster: "
    "`octavo up --on ray`"
)
_BALANCING = "the router balances over all replicas, of any machine: name them in scheduler_addresses"
_RANKS = "ranks find each other through their scheduler: step_addresses=tcp://HOST:PORT"
_REPLICAS = f"replicas that share experts meet at the scheduler of replica 0, which step_addresses names; {_BALANCING}"
_REPLICA = f"`{_SCHEDULER} --replica D` and `{_WORKER} --replica D` name the replica"


@dataclass(frozen=True, slots=True)
class _Name:
    instead: str
    # Values, as text, that ask for nothing.
    neutral: tuple[str, ...] = ()


_NAMES: Mapping[str, _Name] = {
    "nnodes": _Name(_MACHINES, ("1",)),
    "node_rank": _Name(f"`{_WORKER} --rank R --replica D` starts a worker anywhere; {_MACHINES}", ("0",)),
    "headless": _Name(f"`{_SCHEDULER}` and `{_WORKER}` start a replica without a router", ("false",)),
    "master_addr": _Name(_RANKS),
    "master_port": _Name(_RANKS),
    "data_parallel_address": _Name(_REPLICAS),
    "data_parallel_rpc_port": _Name(_REPLICAS),
    "data_parallel_size_local": _Name(
        f"`octavo up` starts all replicas of data_parallel_size on this machine; on another one, `{_SCHEDULER} "
        "--replica D` with scheduler_addresses starts one of them"
    ),
    "data_parallel_start_rank": _Name(_REPLICA, ("0",)),
    "data_parallel_rank": _Name(_REPLICA, ("0",)),
    "data_parallel_backend": _Name("distributed_executor_backend=ray, or `octavo up --on ray`", ("mp",)),
    "data_parallel_hybrid_lb": _Name(_BALANCING, ("false",)),
    "data_parallel_external_lb": _Name(f"num_routers of them behind any balancer; {_BALANCING}", ("false",)),
    "distributed_timeout_seconds": _Name("step_timeout for steps that do not end, heartbeat_timeout for silent ranks"),
    "decode_context_parallel_size": _Name("tensor_parallel_size, which divides the KV cache by its heads", ("1",)),
    "prefill_context_parallel_size": _Name("tensor_parallel_size, which divides a prompt's arithmetic", ("1",)),
}

# vLLM's short flags of options that have the same name and meaning here.
SHORT_FLAGS: Mapping[str, str] = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
}
NAMES = tuple(_NAMES)
# Those that take no value as flags.
SWITCHES = ("headless", "data_parallel_hybrid_lb", "data_parallel_external_lb")


def refusal(name: str, value: object) -> str | None:
    """Why one of NAMES is refused, for people; None if its value asks for nothing."""
    known = _NAMES[name]
    if str(value).lower() in known.neutral:
        return None
    only = f" (only {known.neutral[0]} is taken)" if known.neutral else ""
    return f"{name}={value!r}: vLLM's option is not one of Octavo's{only}. Instead: {known.instead}"
