"""The tuner: which tiles it tries, how it spreads work over GPUs and resumes; the GPUs' times are made up."""

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.gemm.fp8.tuned_files import file_name
from kernels.moe.gemm.tiles import as_moe_tile
from kernels.triton_common.tuned_tiles import Tile, read_tiles
from octavo.bench.tune.problem import BATCH_SIZES, Device, ExpertsShape, Measurement, Problem, Shape, candidates
from octavo.bench.tune.tuner import Best, Tuner
from octavo.lab.errors import TuningError

H200 = Device(name="NVIDIA H200", num_gpus=1, num_sms=132, shared_memory=227 << 10)
SHAPE = Shape(N=12288, K=7168, blockwise=True)
NAME = file_name(12288, 7168, "NVIDIA H200", blockwise=True)
WITH = {"device": "NVIDIA H200", "triton": "3.6.0"}
SIZES = (1, 16, 64)


def microseconds(M: int, tile: Tile) -> float:
    """A made-up time that differs for nearly all tiles; small and large batches have different fastest tiles."""
    return 1000 / tile.block_n + abs(tile.block_m - M) + 10 / tile.num_stages + tile.num_warps + tile.group_m / 7


class FakeGpu:
    """Records its tries; `before` may stop it at one of them."""

    def __init__(self, before: Callable[[int, Tile], None] = lambda M, tile: None) -> None:
        self.tries: list[tuple[int, Tile]] = []
        self.is_closed = False
        self._before = before

    def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
        assert shape == SHAPE
        self._before(M, tile)
        self.tries.append((M, tile))
        return Measurement(microseconds=microseconds(M, tile))

    def close(self) -> None:
        self.is_closed = True


def tune(folder: Path, *gpus: FakeGpu, sizes: tuple[int, ...] = SIZES, shape: Shape = SHAPE) -> list[Best]:
    device = dataclasses.replace(H200, num_gpus=len(gpus))
    tuner = Tuner(device, folder, WITH, lambda number: gpus[number])
    bests: list[Best] = []
    tries: list[int] = []
    tuner.tune(shape, sizes, on_tries=tries.append, on_best=bests.append)
    assert sum(tries) == tuner.num_candidates(shape, sizes), "the progress bar would not end"
    return sorted(bests, key=lambda best: best.M)


def expected(sizes: tuple[int, ...] = SIZES) -> dict[int, Tile]:
    return {M: min(candidates(M, SHAPE, H200), key=lambda tile, M=M: microseconds(M, tile)) for M in sizes}


# --- candidates


def test_published_tiles_are_among_those_tried() -> None:
    small = Tile(block_m=16, block_n=32, block_k=128, group_m=1, num_warps=4, num_stages=5)
    assert small in candidates(8, SHAPE, H200)
    for stages, M in itertools.product((3, 4), (256, 3072)):
        large = Tile(block_m=64, block_n=128, block_k=128, group_m=32, num_warps=4, num_stages=stages)
        assert large in candidates(M, SHAPE, H200)


@pytest.mark.parametrize("M", BATCH_SIZES)
def test_what_is_tried_fits_and_differs(M: int) -> None:
    tiles = candidates(M, SHAPE, H200)
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.num_stages * tile.block_k * (tile.block_m + tile.block_n) <= H200.shared_memory
        # 128 x 128 tiles spill registers at 4 warps.
        assert (tile.block_m, tile.block_n, tile.num_warps) != (128, 128, 4)
        assert tile.group_m == 1 or tile.block_m < M
    assert len(tiles) > 50


def test_k_is_split_only_where_programs_are_few() -> None:
    narrow = dataclasses.replace(SHAPE, N=1024)
    assert {tile.split_k for tile in candidates(1, narrow, H200)} > {1}
    assert {tile.split_k for tile in candidates(4096, SHAPE, H200)} == {1}


def test_less_shared_memory_leaves_fewer() -> None:
    small = dataclasses.replace(H200, shared_memory=99 << 10)
    assert set(candidates(256, SHAPE, small)) < set(candidates(256, SHAPE, H200))


# --- results


def test_the_fastest_tiles_are_written(tmp_path: Path) -> None:
    gpu = FakeGpu()
    bests = tune(tmp_path, gpu)
    assert read_tiles(tmp_path / NAME) == expected() == {best.M: best.tile for best in bests}
    assert [best.microseconds for best in bests] == [microseconds(best.M, best.tile) for best in bests]
    assert gpu.is_closed
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_other_batch_sizes_of_the_file_stay(tmp_path: Path) -> None:
    tune(tmp_path, FakeGpu(), sizes=(1,))
    tune(tmp_path, FakeGpu(), sizes=(64,))
    assert read_tiles(tmp_path / NAME) == expected((1, 64))


def test_gpus_share_the_batch_sizes(tmp_path: Path) -> None:
    """Each GPU takes a batch size before either has done its first try. Every size is done once."""
    both = threading.Barrier(2, timeout=30)

    def meet_at_first_try() -> Callable[[int, Tile], None]:
        tries = itertools.count()
        return lambda M, tile: None if next(tries) else void(both.wait())

    gpus = FakeGpu(meet_at_first_try()), FakeGpu(meet_at_first_try())
    tune(tmp_path, *gpus)
    assert read_tiles(tmp_path / NAME) == expected()
    assert sorted(M for gpu in gpus for M in {M for M, _ in gpu.tries}) == list(SIZES)
    assert all(gpu.tries and gpu.is_closed for gpu in gpus)


def void(value: object) -> None:
    del value


def test_no_more_gpus_than_batch_sizes(tmp_path: Path) -> None:
    gpus = FakeGpu(), FakeGpu()
    tune(tmp_path, *gpus, sizes=(1,))
    assert not gpus[1].tries


# --- interruptions


def interrupt_after(count: int) -> Callable[[int, Tile], None]:
    tries = itertools.count()

    def before(M: int, tile: Tile) -> None:
        if next(tries) == count:
            raise KeyboardInterrupt

    return before


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Interrupted within a batch size, a run measures nothing twice and ends with the result of a whole run."""
    first, second = FakeGpu(interrupt_after(100)), FakeGpu()
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, first)
    assert first.is_closed
    assert not (tmp_path / NAME).exists()
    tune(tmp_path, second)
    assert read_tiles(tmp_path / NAME) == expected()
    assert len(first.tries) == 100
    assert not set(first.tries) & set(second.tries)


def test_an_error_of_one_gpu_stops_the_other(tmp_path: Path) -> None:
    """The other GPU is in the middle of a try, whose result is kept."""
    failed = threading.Event()

    def fail(M: int, tile: Tile) -> None:
        failed.set()
        raise TuningError("GPU 0 is gone")

    broken, other = FakeGpu(fail), FakeGpu(lambda M, tile: void(failed.wait(30)))
    with pytest.raises(TuningError, match="GPU 0 is gone"):
        tune(tmp_path, broken, other)
    assert other.is_closed
    assert (tmp_path / f"{NAME}.partial").exists()


def interrupted(tmp_path: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, FakeGpu(interrupt_after(10)))
    return tmp_path / f"{NAME}.partial"


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    partial = interrupted(tmp_path)
    partial.write_bytes(partial.read_bytes()[:-9])
    gpu = FakeGpu()
    tune(tmp_path, gpu)
    assert len(gpu.tries) == sum(len(candidates(M, SHAPE, H200)) for M in SIZES) - 9
    assert read_tiles(tmp_path / NAME) == expected()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("3.6.0", "3.5.1"), r"was begun with triton='3\.5\.1' \(now '3\.6\.0'\)"),
        (lambda text: text.replace('"result"', '"answer"'), r"line 2, is no result .*result"),
        (lambda text: text + "[]\n", "line 12"),
        (lambda text: text + "nonsense\n", "line 12"),
    ],
)
def test_what_does_not_fit_is_not_gone_on_with(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    partial = interrupted(tmp_path)
    changed = change(partial.read_text())
    partial.write_text(changed)
    with pytest.raises(TuningError, match=said) as caught:
        tune(tmp_path, FakeGpu())
    assert str(partial) in str(caught.value)
    assert "remove the file to begin anew" in str(caught.value)
    assert partial.read_text() == changed, "what was measured is lost"


# --- tiles that do not work


class FailingGpu(FakeGpu):
    def __init__(self, works: Callable[[Tile], bool]) -> None:
        super().__init__()
        self._works = works

    def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
        measured = super().measure(M, shape, tile)
        return measured if self._works(tile) else Measurement(microseconds=None, error="out of resources")


def test_tiles_that_fail_are_left_out(tmp_path: Path) -> None:
    bests = tune(tmp_path, FailingGpu(lambda tile: tile.block_n == 32))
    assert {best.tile.block_n for best in bests} == {32}
    for best in bests:
        tiles = candidates(best.M, SHAPE, H200)
        assert (best.num_tried, best.num_failed) == (len(tiles), sum(tile.block_n != 32 for tile in tiles))


def test_if_all_fail_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"--shape 12288,7168: no tile works for a batch of 64; .* out of resources"):
        tune(tmp_path, FailingGpu(lambda tile: False))


def test_a_file_that_is_malformed_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"16": {}}))
    with pytest.raises(TuningError, match="16: BLOCK_SIZE_M is missing"):
        tune(tmp_path, FakeGpu())
    assert json.loads((tmp_path / NAME).read_text()) == {"16": {}}


# --- experts

EXPERTS = ExpertsShape(num_experts=128, size=768, hidden_size=2048, top_k=8, is_fp8=True)


@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("M", BATCH_SIZES)
def test_tiles_of_experts_fit_differ_and_are_not_mostly_padding(M: int, is_fp8: bool) -> None:
    shape = dataclasses.replace(EXPERTS, is_fp8=is_fp8)
    tiles = shape.candidates(M, H200)
    here = [as_moe_tile(tile, is_fp8=is_fp8) for tile in tiles]
    assert len(set(here)) == len(here) > 20
    for tile in here:
        columns = max(2 * tile.gated_block_n, tile.down_block_n)
        assert tile.num_stages * tile.depth_bytes * (tile.block_m + columns) <= H200.shared_memory
        assert tile.block_m == 16 or tile.block_m <= 4 * M * 8 / 128


def test_gpus_share_the_batch_sizes_of_experts_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    both, problem = threading.Barrier(2, timeout=30), EXPERTS

    class Gpu(FakeGpu):
        def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
            assert shape == problem
            if not self.tries:
                both.wait()
            if M == 16 and len(self.tries) > 30:
                raise KeyboardInterrupt
            self.tries.append((M, tile))
            return Measurement(microseconds=microseconds(M, tile))

    def tuner(*gpus: FakeGpu) -> Tuner:
        return Tuner(dataclasses.replace(H200, num_gpus=len(gpus)), tmp_path, WITH, lambda number: gpus[number])

    quiet = {"on_tries": lambda count: None, "on_best": lambda best: None}
    first = Gpu(), Gpu()
    with pytest.raises(KeyboardInterrupt):
        tuner(*first).tune(problem, (16, 1024), **quiet)
    assert all(gpu.tries for gpu in first)

    class Rest(Gpu):
        def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
            assert (M, tile) not in [tried for gpu in first for tried in gpu.tries], "it was measured before"
            return Measurement(microseconds=microseconds(M, tile))

    path = tuner(Rest(), Rest()).tune(problem, (16, 1024), **quiet)
    assert path.name == "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    fastest = {M: min(problem.candidates(M, H200), key=lambda tile, M=M: microseconds(M, tile)) for M in (16, 1024)}
    assert read_tiles(path) == fastest
