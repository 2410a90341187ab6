"""The flags of `octavo tune` and of `octavo bench sweep`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.quantization import offered
from octavo.lab.bounds import Bounds
from octavo.lab.flags import flag
from octavo.lab.settings import AXES

_GRID, _REQUESTS, _BOUNDS, _EFFORT = "Settings to try", "What is sent", "What must hold", "Effort"
# Options of which each cluster has its own; of these a sweep takes `trace`.
OWN = ("port", "http_port", "metrics_port", "runtime_dir", "trace")
JSON_HELP = "Print one JSON object per line, for programs, and no progress bar."


def _axis(help: str) -> Any:
    return flag("", _GRID, help, metavar="V,V,...")


def _limit(help: str) -> Any:
    return flag(None, _BOUNDS, help, min=0, metavar="MS")


def _restart() -> Any:
    return flag(False, None, "Forget what an earlier run has measured.", "--restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """The flags as given; those of axes are text, empty if not given."""

    max_num_seqs: str = _axis("Rows. Default: a quarter, half, once and twice the option's value.")
    max_num_batched_tokens: str = _axis("Budgets of a step. Default: as for --max-num-seqs.")
    speculation: str = _axis("Methods of speculative_config, and off: off,suffix,ngram.")
    block_size: str = _axis("Tokens of a KV block.")
    max_steps_in_flight: str = _axis("Steps in flight.")
    worker_threads: str = _axis("Threads of a worker.")
    tensor_parallel_size: str = _axis("Ranks that share each layer.")
    pipeline_parallel_size: str = _axis("Stages.")
    data_parallel_size: str = _axis("Replicas.")
    quantization: str = _axis(f"Quantization of the weights: {','.join(offered(on_gpu=False))}.")
    num_requests: int = flag(100, _REQUESTS, "Requests of a whole measurement.", min=2)
    min_prefix_hit_rate: float = flag(
        0.0,
        _REQUESTS,
        "Prompts share a beginning, so that the prefix cache should have this share of their tokens; settings that "
        "stay below it are rejected.",
        min=0,
        max=0.99,
    )
    max_ttft_ms: float | None = _limit("Limit of the 99th percentile of the time to the first token.")
    max_itl_ms: float | None = _limit("Limit of the 99th percentile of the time between tokens.")
    max_e2e_ms: float | None = _limit("Limit of the 99th percentile of the whole request's time.")
    margin: float = flag(
        0.15,
        _EFFORT,
        "Settings that are predicted to be worse than the best by more than this share are skipped.",
        min=0,
        max=1,
    )
    max_measured: int = flag(4, _EFFORT, "Most settings that are measured on a cluster.", min=1)
    rounds: int = flag(3, _EFFORT, "Measurements of each finalist, in turns.", min=1)
    exhaustive: bool = flag(False, _EFFORT, "Measure the whole grid, whatever is predicted.", "--exhaustive")
    profile: bool = flag(True, _EFFORT, "Record the best setting's steps with torch.profiler.")
    output: Path = flag(Path("octavo-tune"), None, "Where state, traces, logs and the report go.", metavar="DIR")
    restart: bool = _restart()
    as_json: bool = flag(False, None, JSON_HELP, "--json")

    @property
    def axes(self) -> dict[str, str]:
        """By name, for all AXES."""
        return {name: self.speculation if name == "speculative_config" else getattr(self, name) for name in AXES}

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            ttft_ms=self.max_ttft_ms or math.inf,
            itl_ms=self.max_itl_ms or math.inf,
            e2e_ms=self.max_e2e_ms or math.inf,
            min_hit_rate=self.min_prefix_hit_rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags:
    """The flags as given."""

    assignments: list[str] | None = flag(
        None,
        None,
        "An option of `octavo up` and its values. Several: every combination is measured.",
        "--set",
        metavar="NAME=V,V,...",
    )
    request_rate: str = flag(
        "inf", None, "Requests per second; each is measured with every setting.", metavar="R|inf,..."
    )
    num_runs: int = flag(1, None, "How often all is measured, settings in turn.", min=1)
    num_requests: int = flag(64, None, "Requests of a measurement.", min=1)
    output: Path = flag(Path("octavo-sweep"), None, "Where sweep.csv, sweep.png, state and logs go.", metavar="DIR")
    restart: bool = _restart()
    as_json: bool = flag(False, None, JSON_HELP, "--json")
