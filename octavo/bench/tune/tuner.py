"""Spreads batch sizes over GPUs, keeps the fastest tile of each, and continues from an earlier run's measurements."""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kernels.triton_common.tuned_tiles import Tile, TunedConfigError, read_tiles, write_tiles
from octavo.bench.tune.problem import Device, Measurement, Problem
from octavo.lab.errors import TuningError
from octavo.lab.journal import Journal


# In tests the times are made up: there is no GPU to measure.
class Gpu(Protocol):
    """Measures on one GPU: GpuProcess, and in tests one whose times are made up."""

    def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest tile of one batch size."""

    M: int
    shape: Problem
    tile: Tile
    microseconds: float
    num_tried: int
    # How many of those failed.
    num_failed: int

    @property
    def tflops(self) -> float:
        return self.shape.flops(self.M) / self.microseconds / 1e6


class Tuner:
    """Tunes one shape after another and writes the files to a folder."""

    def __init__(
        self, device: Device, folder: Path, measured_with: Mapping[str, str], open_gpu: Callable[[int], Gpu]
    ) -> None:
        """measured_with: versions and device, kept with unfinished results. open_gpu: opens a GPU by its index."""
        self._device, self._folder = device, folder
        self._measured_with = dict(measured_with)
        self._open_gpu = open_gpu

    def num_candidates(self, shape: Problem, batch_sizes: Sequence[int]) -> int:
        return sum(len(shape.candidates(M, self._device)) for M in batch_sizes)

    def tune(
        self,
        shape: Problem,
        batch_sizes: Sequence[int],
        *,
        on_tries: Callable[[int], None],
        on_best: Callable[[Best], None],
    ) -> Path:
        """Writes the file of this shape; entries of other batch sizes in it stay.

        on_tries: called with how many more candidates are done; those of an interrupted run count at once. on_best:
        called for each batch size that is done. Calls come from any thread, one at a time. Raises TuningError;
        measurements are kept.
        """
        path = self._folder / shape.file_name(self._device.name)
        try:
            tiles = read_tiles(path, max_block_k=shape.max_block_k) if path.exists() else {}
        except TunedConfigError as error:
            raise TuningError(str(error)) from None
        partial = path.with_name(path.name + ".partial")
        journal = Journal(partial, self._measured_with, advice="continue with those, or remove the file to begin anew")
        try:
            bests = _Run(self._device, shape, journal, on_tries, on_best).spread(batch_sizes, self._open_gpu)
            write_tiles(path, tiles | {best.M: best.tile for best in bests})
        finally:
            journal.close()
        partial.unlink()
        return path


class _Run:
    """Tunes one shape: a thread per GPU takes batch sizes until none is left."""

    def __init__(
        self,
        device: Device,
        shape: Problem,
        journal: Journal,
        on_tries: Callable[[int], None],
        on_best: Callable[[Best], None],
    ) -> None:
        self._device, self._shape, self._journal = device, shape, journal
        self._on_tries, self._on_best = on_tries, on_best
        # Guards everything that the threads share.
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._bests: list[Best] = []
        self._is_stopped = False

    def spread(self, batch_sizes: Sequence[int], open_gpu: Callable[[int], Gpu]) -> list[Best]:
        # Largest first: they have the most candidates, and a short job should be the last to end.
        self._waiting.extend(sorted(set(batch_sizes), reverse=True))
        gpus = [open_gpu(number) for number in range(min(self._device.num_gpus, len(self._waiting)))]
        try:
            with ThreadPoolExecutor(len(gpus)) as threads:
                futures = [threads.submit(self._serve, gpu) for gpu in gpus]
                try:
                    for future in as_completed(futures):
                        future.result()
                except BaseException:
                    # The pool waits for its threads, so they have to end.
                    self._is_stopped = True
                    raise
        finally:
            for gpu in gpus:
                gpu.close()
        return sorted(self._bests, key=lambda best: best.M)

    def _serve(self, gpu: Gpu) -> None:
        while not self._is_stopped:
            with self._lock:
                if not self._waiting:
                    return
                M = self._waiting.popleft()
            self._tune(M, gpu)

    def _tune(self, M: int, gpu: Gpu) -> None:
        keys = {tile: _key(M, tile) for tile in self._shape.candidates(M, self._device)}
        results = self._journal.results
        with self._lock:
            known = {tile: Measurement(**results[key]) for tile, key in keys.items() if key in results}
            self._on_tries(len(known))
        for tile, key in keys.items():
            if self._is_stopped:
                return
            if tile in known:
                continue
            known[tile] = measurement = gpu.measure(M, self._shape, tile)
            with self._lock:
                self._journal.put(key, asdict(measurement))
                self._on_tries(1)
        best = _best(M, self._shape, {tile: known[tile] for tile in keys})
        with self._lock:
            self._bests.append(best)
            self._on_best(best)


def _key(M: int, tile: Tile) -> str:
    return f"M={M} {json.dumps(tile.as_json())}"


def _best(M: int, shape: Problem, tries: Mapping[Tile, Measurement]) -> Best:
    """Picks the fastest tile. tries: in the order of candidates; the first wins if times are equal."""
    times = {tile: tried.microseconds for tile, tried in tries.items() if tried.microseconds is not None}
    if not times:
        first = next(iter(tries.values()), Measurement(microseconds=None, error="there is no candidate"))
        raise TuningError(f"--shape {shape.flag}: no tile works for a batch of {M}; the first one: {first.error}")
    tile = min(times, key=lambda tile: times[tile])
    return Best(
        M=M, shape=shape, tile=tile, microseconds=times[tile], num_tried=len(tries), num_failed=len(tries) - len(times)
    )


# --- Output


def best_as_json(best: Best) -> dict[str, Any]:
    shape = best.shape
    return {
        "op": shape.op,
        **shape.sizes,
        "M": best.M,
        "microseconds": round(best.microseconds, 3),
        "tflops": round(best.tflops, 1),
        "tile": best.tile.as_json(),
        "num_tried": best.num_tried,
        "num_failed": best.num_failed,
    }


def title_of(shape: Problem) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.sizes.items() if isinstance(value, int))


def print_table(shape: Problem, bests: Sequence[Best], path: Path) -> None:
    # Fits into 80 columns.
    names = ("M", "us", "TFLOP/s", "tile", "warps", "stages", "group", "parts", "failed")
    table = Table(*names, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for best in sorted(bests, key=lambda best: best.M):
        tile = best.tile
        table.add_row(
            str(best.M),
            f"{best.microseconds:.1f}",
            f"{best.tflops:,.0f}",
            f"{tile.block_m}x{tile.block_n}x{tile.block_k}",
            *map(str, (tile.num_warps, tile.num_stages, tile.group_m, tile.split_k)),
            f"{best.num_failed}/{best.num_tried}",
        )
    console = Console()
    console.print(title_of(shape), style="bold", highlight=False)
    console.print(table)
    console.print(str(path), style="dim", highlight=False, soft_wrap=True)
