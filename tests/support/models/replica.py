"""All ranks of a replica as threads of one process, connected by gloo over loopback. PyTorch must compute, because the
C++ kernels of one process serve only one rank."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.options import Options
from protos import step_pb2
from worker.cpu.build import build_cpu_runner
from worker.cpu.threaded_runner import ThreadedRunner
from worker.encoders.items import Items
from worker.parallel.axes import axes_of
from worker.parallel.group_init import connect_ranks
from worker.parallel.groups import Groups
from worker.step.runner import PendingResult


class RanksItems:
    """A worker.step.runner.PreparesItems: an item is prepared once all ranks that encode have prepared it."""

    def __init__(self, ranks: Sequence[Items]) -> None:
        self._ranks = ranks
        # By number: the ranks that are to answer, and their errors.
        self._missing: dict[int, int] = {}
        self._errors: dict[int, str] = {}

    @property
    def cache_size(self) -> int:
        return min(rank.cache_size for rank in self._ranks)

    def prepare(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        self._missing[message.number], self._errors[message.number] = len(self._ranks), ""
        for rank in self._ranks:
            rank.prepare(message, when_done)

    @property
    def num_input_bytes(self) -> int:
        return sum(rank.num_input_bytes for rank in self._ranks)

    def take_seconds(self) -> float:
        return sum(rank.take_seconds() for rank in self._ranks)

    def take_done(self) -> list[tuple[int, str]]:
        done: list[tuple[int, str]] = []
        for rank in self._ranks:
            for number, error in rank.take_done():
                self._missing[number] -= 1
                self._errors[number] = self._errors[number] or error
                if not self._missing[number]:
                    done.append((number, self._errors[number]))
        return done


class RanksResult:
    """A worker.step.runner.PendingResult: the result of the rank that sends it."""

    def __init__(self, results: Sequence[PendingResult], told: int) -> None:
        self._results, self._told = results, told

    @property
    def is_done(self) -> bool:
        return all(each.is_done for each in self._results)

    def result(self) -> step_pb2.StepResult:
        return [each.result() for each in self._results][self._told]

    def call_when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


class Ranks:
    """A worker.step.runner.StepRunner: all ranks of a replica, connected, as threads of this process."""

    holds_constrained = False

    def __init__(self, options: Options, directory: Path) -> None:
        axes = axes_of(options)
        runners = [build_cpu_runner(options, rank=rank) for rank in range(axes.world_size)]
        self._ranks = [ThreadedRunner(each, max_steps_in_flight=options.max_steps_in_flight) for each in runners]
        # Where results are sent.
        self._told = axes.world_size - options.tensor_parallel_size
        self.model_info, self.num_swap_blocks = runners[0].model_info, runners[0].num_swap_blocks
        self.drafters = [each.drafter for each in runners]
        encoding = [each.items for each in runners if each.items is not None]
        self.items = RanksItems(encoding) if encoding else None

        def groups(rank: int) -> Groups:
            address = f"file:{directory / 'rendezvous'}"
            return connect_ranks(address, axes, rank, call_timeout=60, while_waiting=lambda: None)

        with ThreadPoolExecutor(axes.world_size) as threads:
            for rank, each in zip(self._ranks, threads.map(groups, range(axes.world_size)), strict=True):
                rank.join(each)

    @property
    def drafter(self) -> str:
        return self.drafters[self._told]

    @property
    def num_live_rows(self) -> int:
        return self._ranks[self._told].num_live_rows

    def begin(self, plan: step_pb2.StepPlan) -> PendingResult:
        return RanksResult([rank.begin(plan) for rank in self._ranks], self._told)

    def reset(self) -> None:
        for rank in self._ranks:
            rank.reset()

    def join(self, groups: Groups | None, while_waiting: Callable[[], None] = lambda: None) -> None:
        for rank in self._ranks:
            rank.join(groups)
