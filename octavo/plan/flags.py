"""The flags of `octavo plan`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.quantization import KINDS
from octavo.lab.flags import LENGTHS, flag

_COSTS, _WORKLOAD, _GRID, _OUTPUT = (
    "Costs: from measurements (--fit) or a GPU's data sheet (--gpu)",
    "Workload",
    "Settings to try: N or N,N,...",
    "Output",
)
_BITS = ", ".join(f"{kind.name} in {kind.bits} bits" for kind in KINDS.values())
# Options that are flags with lists here.
OPTION_AXES = ("max_num_seqs", "max_num_batched_tokens", "data_parallel_size")
PLAN_AXES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)


def _axis(help: str) -> Any:
    return flag("", _GRID, help, metavar="N,N,...")


def _limit(help: str) -> Any:
    return flag(None, _OUTPUT, help, min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags as given; those of axes are text."""

    fit: list[Path] | None = flag(
        None,
        _COSTS,
        "Output of `octavo bench throughput --json` from the machine in question: its steps give the costs. "
        "Output of `octavo bench serve --json` adds the costs of a cluster. May be given several times.",
        metavar="FILE",
    )
    gpu: str = flag(
        "",
        _COSTS,
        "A GPU, such as H200, whose data sheet gives the costs. auto: this machine's GPUs and their links.",
        metavar="NAME|auto",
    )
    device: Literal["", "cpu", "tpu"] = flag(
        "",
        _COSTS,
        "Plan no load. cpu: divide the model over this machine's sockets and NUMA nodes. tpu: the page size.",
        metavar="cpu|tpu",
    )
    model: str = flag(
        "",
        _COSTS,
        "With --gpu or --device: a config.json, a directory with one, a .gguf file, package:NAME or a hub name. "
        "Default: the option `model`.",
        metavar="CONFIG",
    )
    num_gpus: int = flag(0, _COSTS, "With --gpu: try every TP x PP x DP on this many GPUs, and recommend one.", min=0)
    interconnect: str = flag(
        "",
        _COSTS,
        "nvlink, pcie or net:GBIT between GPUs; two: within hosts and between them. Default: the GPU's fastest.",
        metavar="KIND[,KIND]",
    )
    gpus_per_node: int = flag(8, _COSTS, "GPUs in one host.", min=1)
    gpu_memory_utilization: float = flag(0.9, _COSTS, "Fraction of a GPU's memory to use.")
    quantization: str = flag(
        "none",
        _COSTS,
        f"How the layers' weights are stored: {_BITS}, plus scales.",
        metavar="|".join(("none", *KINDS)),
    )
    num_requests: int = flag(1000, _WORKLOAD, "How many requests are sent.", min=1)
    request_rate: float = flag(
        math.inf, _WORKLOAD, "Requests per second, arriving at random. inf: all at once.", metavar="R|inf"
    )
    concurrency: int = flag(0, _WORKLOAD, "Most requests in flight at once. 0: no limit.", min=0)
    prompt_len: str = flag("128", _WORKLOAD, f"Tokens in a prompt: {LENGTHS}.", metavar="LENGTH")
    output_len: str = flag("128", _WORKLOAD, "Tokens in an output: as --prompt-len.", metavar="LENGTH")
    shared_prefix: float = flag(
        0.0, _WORKLOAD, "Fraction of each prompt that is a prefix shared with others.", min=0, max=1
    )
    num_prefixes: int = flag(1, _WORKLOAD, "How many different shared prefixes there are.", min=1)
    arrivals: Path | None = flag(
        None,
        _WORKLOAD,
        "Take the requests from a file instead. Its header: arrival_s,prompt_len,output_len[,prefix_id].",
        metavar="FILE.csv",
    )
    trace: list[Path] | None = flag(
        None,
        _WORKLOAD,
        "Take the requests, their tokens and times from a trace of `octavo up --trace FILE`. Its steps give the costs, "
        "and its settings hold where no others are given. May be given several times.",
        metavar="FILE",
    )
    acceptance: float | None = flag(
        None,
        _WORKLOAD,
        "Plan with speculation: the probability that a draft is right if those before it are. speculative_config "
        "bounds the drafts of a step; drafting itself takes no time.",
        min=0,
        max=1,
    )
    seed: int = flag(0, _WORKLOAD, "Seed for lengths and arrivals.", min=0)
    max_num_seqs: str = _axis("Most sequences that a replica runs at once.")
    max_num_batched_tokens: str = _axis("Token budget of one step.")
    data_parallel_size: str = _axis("Replicas; each request goes to the least loaded.")
    tensor_parallel_size: str = _axis("With --gpu: GPUs that share each layer.")
    pipeline_parallel_size: str = _axis("With --gpu: stages, each with some of the layers.")
    max_itl_ms: float | None = _limit("Limit for the 99th percentile of ITL, the time between tokens.")
    max_ttft_ms: float | None = _limit("Limit for the 99th percentile of TTFT, the time to the first token.")
    plot: Path | None = flag(None, _OUTPUT, "Also plot the outcomes.", metavar="FILE.png")
    as_json: bool = flag(False, _OUTPUT, "Print one JSON object per line, for programs.", "--json")

    @property
    def axes(self) -> dict[str, str]:
        """By name, for all PLAN_AXES; empty: the option's value only."""
        return {name: getattr(self, name) for name in PLAN_AXES}
