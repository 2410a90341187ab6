"""What a scheduler looks like from outside its step loop."""

from dataclasses import dataclass

from scheduler.messages import CoreLoad, CoreStats

_NO_LOAD = CoreLoad(num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0, num_queued_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    """A snapshot, published by the step loop and read by metrics, /health and logs on other threads."""

    load: CoreLoad = _NO_LOAD
    stats: CoreStats
    # Empty before the first epoch.
    model_name: str = ""
    # Host blocks for swapped KV.
    num_swap_blocks: int = 0
    # Sequences that were running when an epoch of workers ended, so far: they wait and are computed again.
    num_lost_with_workers: int = 0
    epoch: int = 0
    workers_ready: bool = False
    draining: bool = False
    # What the workers do, in a few words.
    workers: str = "starting"
    # Runs of steps that all replicas have computed together.
    num_waves: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Blocks that are in use, 0 to 1."""
        load = self.load
        return 1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0

    @property
    def swap_space_usage(self) -> float:
        """Host blocks that hold swapped KV, 0 to 1."""
        return 1.0 - self.load.num_free_swap_blocks / self.num_swap_blocks if self.num_swap_blocks else 0.0

    @property
    def health(self) -> tuple[bool, str]:
        """Whether it serves at once what comes, and a line that says why."""
        if self.draining:
            return False, f"draining: {self.load.num_running} running, {self.load.num_waiting} waiting"
        if not self.workers_ready:
            return False, self.workers
        return True, f"{self.workers}: {self.load.num_running} running, {self.load.num_waiting} waiting"
