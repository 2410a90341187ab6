"""Spreads batch sizes over GPUs, keeps the fastest tile of each, and continues from an earlier run's measurements."""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kernels.triton_common.tuned_tiles import (
    MAX_FP8_BLOCK_K,
    Tile,
    TileError,
    TunedConfigError,
    read_tiles,
    tile_from_json,
    write_tiles,
)
from octavo.bench.tune.problem import Device, Measurement, Problem, TuneError

Measured = dict[int, dict[Tile, Measurement]]


class PartialResults:
    """Measurements by batch size and tile, read from a file and appended to it. `close` keeps the file, `remove`
    deletes it."""

    def __init__(self, path: Path, measured_with: Mapping[str, str], max_block_k: int = MAX_FP8_BLOCK_K) -> None:
        """max_block_k: of the op's tiles. Raises TuneError if the file was begun with other versions or another device,
        or has an unknown format."""
        self.path = path
        self._max_block_k = max_block_k
        self.measured: Measured = {}
        lines = self._whole_lines()
        if lines:
            self._check_begun_with(lines[0], measured_with)
            for number, line in enumerate(lines[1:], 2):
                self._take(number, line)
        self._file = path.open("a")
        if not lines:
            self._append(measured_with)

    def add(self, M: int, tile: Tile, measurement: Measurement) -> None:
        self.measured.setdefault(M, {})[tile] = measurement
        self._append(
            {"M": M, "tile": tile.as_json(), "microseconds": measurement.microseconds, "error": measurement.error}
        )

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        # A finished measurement survives, however this process ends.
        self._file.flush()

    def _whole_lines(self) -> list[str]:
        """The complete lines. An interrupted run may have cut off the last one; it is removed from the file."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            self.path.write_bytes(whole)
        return whole.decode(errors="replace").splitlines()

    def _check_begun_with(self, line: str, measured_with: Mapping[str, str]) -> None:
        begun_with = self._object(1, line)
        if begun_with != measured_with:
            raise TuneError(
                f"{self.path} was begun with {_shown(begun_with)}, this is {_shown(measured_with)}: continue with "
                "those, or remove the file to begin anew"
            )

    def _take(self, number: int, line: str) -> None:
        values = self._object(number, line)
        try:
            measurement = Measurement(microseconds=values["microseconds"], error=values["error"])
            self.measured.setdefault(values["M"], {})[tile_from_json(values["tile"], max_block_k=self._max_block_k)] = (
                measurement
            )
        except (KeyError, TileError) as error:
            raise self._unusable(number, repr(error)) from None

    def _object(self, number: int, line: str) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise self._unusable(number, str(error)) from None
        if not isinstance(values, dict):
            raise self._unusable(number, f"{values!r} is not an object")
        return values

    def _unusable(self, number: int, why: str) -> TuneError:
        return TuneError(f"{self.path}, line {number}: {why}; remove the file to begin anew")


def _shown(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


class Gpu(Protocol):
    """Measures on one GPU."""

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
        called for each batch size that is done. Calls come from any thread, one at a time. Raises TuneError;
        measurements are kept.
        """
        path = self._folder / shape.file_name(self._device.name)
        try:
            tiles = read_tiles(path, max_block_k=shape.max_block_k) if path.exists() else {}
        except TunedConfigError as error:
            raise TuneError(str(error)) from None
        results = PartialResults(path.with_name(path.name + ".partial"), self._measured_with, shape.max_block_k)
        try:
            bests = _Run(self._device, shape, results, on_tries, on_best).spread(batch_sizes, self._open_gpu)
            write_tiles(path, tiles | {best.M: best.tile for best in bests})
        except BaseException:
            results.close()
            raise
        results.remove()
        return path


class _Run:
    """Tunes one shape: a thread per GPU takes batch sizes until none is left."""

    def __init__(
        self,
        device: Device,
        shape: Problem,
        results: PartialResults,
        on_tries: Callable[[int], None],
        on_best: Callable[[Best], None],
    ) -> None:
        self._device, self._shape, self._results = device, shape, results
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
        tiles = self._shape.candidates(M, self._device)
        known = {tile: measurement for tile, measurement in self._results.measured.get(M, {}).items() if tile in tiles}
        with self._lock:
            self._on_tries(len(known))
        for tile in tiles:
            if self._is_stopped:
                return
            if tile in known:
                continue
            known[tile] = measurement = gpu.measure(M, self._shape, tile)
            with self._lock:
                self._results.add(M, tile, measurement)
                self._on_tries(1)
        best = _best(M, self._shape, {tile: known[tile] for tile in tiles})
        with self._lock:
            self._bests.append(best)
            self._on_best(best)


def _best(M: int, shape: Problem, tries: Mapping[Tile, Measurement]) -> Best:
    """Picks the fastest tile. tries: in the order of candidates; the first wins if times are equal."""
    times = {tile: tried.microseconds for tile, tried in tries.items() if tried.microseconds is not None}
    if not times:
        first = next(iter(tries.values()), Measurement(microseconds=None, error="there is no candidate"))
        raise TuneError(f"--shape {shape.flag}: no tile works for a batch of {M}; the first one: {first.error}")
    tile = min(times, key=lambda tile: times[tile])
    return Best(
        M=M, shape=shape, tile=tile, microseconds=times[tile], num_tried=len(tries), num_failed=len(tries) - len(times)
    )
