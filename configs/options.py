"""Every option of Octavo, defined once.

An option has one name, vLLM's where vLLM has one, and can be given in a file (configs/*.yaml), in the environment
(OCTAVO_MAX_NUM_SEQS) and as a flag (--max-num-seqs); the later of these wins. `configs.load` reads them; the `octavo`
command makes its flags and its help from the fields of the groups.
"""

from typing import Any, Literal

from pydantic import ConfigDict, model_validator

from configs.groups.gpu import GpuOptions
from configs.groups.kv_cache import CacheOptions
from configs.groups.logs import LogOptions, TelemetryOptions
from configs.groups.media import MediaOptions
from configs.groups.model import ModelOptions
from configs.groups.network import NetworkOptions, SecurityOptions
from configs.groups.parallel import ParallelOptions
from configs.groups.router import RouterOptions
from configs.groups.scheduling import SchedulingOptions
from configs.groups.speculation import SpeculationOptions


# The fields of the last base class come first: in --help, and when options are resolved (a default can follow from
# options before it).
class Options(
    LogOptions,
    NetworkOptions,
    SchedulingOptions,
    SpeculationOptions,
    CacheOptions,
    MediaOptions,
    ModelOptions,
    GpuOptions,
    ParallelOptions,
    RouterOptions,
    SecurityOptions,
    TelemetryOptions,
):
    """The resolved options of one cluster, for all its processes. Immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_together(self) -> "Options":
        for name in ("scheduler_addresses", "step_addresses"):
            addresses: tuple[str, ...] = getattr(self, name)
            if addresses and len(addresses) != self.data_parallel_size:
                raise ValueError(
                    f"{name} has {len(addresses)} addresses but data_parallel_size is "
                    f"{self.data_parallel_size}: give one for each replica"
                )
        self._check_addresses()
        self._check_parallel()
        self._check_routers()
        self._check_tls()
        if self.in_lockstep and len({address.startswith("tcp://") for address in self.step_addresses}) > 1:
            raise ValueError(
                f"step_addresses={','.join(self.step_addresses)}: with enable_expert_parallel all workers talk to each "
                f"other: give tcp:// for all replicas, or ipc:// for all"
            )
        if self.metrics_port and self.metrics_port + self.num_processes > 65_536:
            raise ValueError(
                f"metrics_port={self.metrics_port}: {self.num_processes} processes take as many ports from there; "
                f"use {65_536 - self.num_processes} or less"
            )
        self._check_prefills()
        self._check_kv_events(self.data_parallel_size)
        self._check_model_len()
        self._check_logprobs()
        return self

    def as_file(self) -> dict[str, Any]:
        """The options as a file holds them. A block_size and a kv_cache_memory that nobody gave are left out: the size
        follows from the model, and of the memory images and videos take only if it was given."""
        left_out = {"block_size", "kv_cache_memory"} - self.model_fields_set
        return self.model_dump(mode="json", exclude=left_out)

    @property
    def num_processes(self) -> int:
        """The number of processes of the whole cluster."""
        return self.num_router_processes + self.data_parallel_size * (1 + self.world_size)

    def process_metrics_port(
        self, kind: Literal["router", "scheduler", "worker"], number: int = 0, rank: int = 0
    ) -> int:
        """The port of one process's /metrics and /health; 0 if they are off.

        number: the router or the replica. rank: the worker, or the process of a router.
        """
        if not self.metrics_port:
            return 0
        offset = {
            "router": number * self.api_server_count + rank,
            "scheduler": self.num_router_processes + number,
            "worker": self.num_router_processes + self.data_parallel_size + number * self.world_size + rank,
        }[kind]
        return self.metrics_port + offset
