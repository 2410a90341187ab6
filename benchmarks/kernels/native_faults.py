"""Makes deliberate faults in the C++ kernels, one at a time: each must make a test of exact bits or values fail.

    python -m benchmarks.kernels.native_faults               all: 15 minutes on two cores
    python -m benchmarks.kernels.native_faults --only value  those whose name has "value"

Works in copies of kernels, worker and tests, whose kernels are compiled with -O1. The tests emulate what this CPU
lacks, AMX too. First runs them without a fault. Prints a line for each fault, and ends with exit code 1 if one was not
found.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.support.kernels.faults import Fault
from tests.support.repository import ROOT

_FLOATS, _LINEAR = "tests/kernels/linear/test_linear.py", "tests/kernels/linear/test_quantized.py"
_ATTENTION = "tests/kernels/attention/test_paged.py"
_WRITE = "tests/kernels/kv_cache/test_write.py"
_tiles = partial(Fault, path="kernels/linear/dots/tile_dots.h", test=_LINEAR)
_attention = partial(Fault, path="kernels/attention/paged/cpp/amx_attention.h", test=_ATTENTION)
_write = partial(Fault, path="kernels/kv_cache/write/rope_cache_write.h", test=_WRITE)
_floats = partial(Fault, path="kernels/linear/dots/bf16/tiles.h", test=_FLOATS)
_short = partial(Fault, path="kernels/linear/dots/bf16/short_panels.h", test=_FLOATS)
FAULTS = (
    _short(
        name="a weight with another exponent is taken for a usual one",
        old="while (__builtin_expect(exception->step == step, false)) {",
        new="while (false) {",
    ),
    _short(
        name="exceptions of the last two inputs change the first two",
        old="_mm512_mask_set1_epi8(upper[1], is_second ? place : 0, exception->upper)",
        new="_mm512_mask_set1_epi8(upper[0], is_second ? place : 0, exception->upper)",
    ),
    _short(
        name="one exception is room for any number",
        old="if (exception == last) return false;",
        new="if (exception == last) break;",
    ),
    _short(
        name="inputs beyond a multiple of four are left out",
        path="kernels/linear/dots/bf16/short_linear.h",
        old="    if (rest) {",
        new="    if (false) {",
    ),
    _floats(
        name="sums of a panel's first part are forgotten",
        old="part ? unfinished[n] : nullptr",
        new="nullptr",
    ),
    _floats(
        name="rows go out from the sums that are being written",
        old="sums_[free_ ^ 1][next_]",
        new="sums_[free_][next_]",
    ),
    _floats(
        name="rows that are late belong to the next panel",
        old="top_ + next_, p_);",
        new="top_ + next_, p_ + 1);",
    ),
    _floats(
        name="the last rows do not go out",
        old="        late.pass_some(kRows);\n    }\n",
        new="    }\n",
    ),
    _floats(
        name="the gate and the rest change places",
        path="kernels/linear/dots/bf16/dots_bf16.h",
        old="silu_for_bf16(gate) * up",
        new="silu_for_bf16(up) * gate",
    ),
    _floats(
        name="a width that tiles do not divide passes as tiles",
        old="rows > kRows && width % TileRows::kInputs == 0",
        new="rows > kRows",
    ),
    _floats(
        name="the lower rows' tiles are those of the upper rows",
        old="const bf16* lower = a + a_steps * TileRows::kSize;",
        new="const bf16* lower = a;",
    ),
    _tiles(
        name="each block multiplies the phase's first inputs",
        old="(place + i * kRows) * kBlock",
        new="place * kBlock",
    ),
    _tiles(name="the second half of the columns is the first", old="weights + v * 4 * V::W", new="weights"),
    Fault(
        name="sums that start at 0 are not corrected",
        path="kernels/linear/dots/dots_vnni.h",
        old="return _mm512_add_epi32(dots, _mm512_set1_epi32(rows.starts[place]));",
        new="return dots;",
        test=_LINEAR,
    ),
    _tiles(
        name="nibbles are unpacked in the wrong order",
        old="_mm512_storeu_si512(place, low_nibbles(both));",
        new="_mm512_storeu_si512(place, high_nibbles(both));",
    ),
    _tiles(
        name="rows left over are not computed",
        old="(last - first + kRows - 1) / kRows",
        new="(last - first) / kRows",
    ),
    _tiles(
        name="a phase's last block is scaled by the first's scales",
        old="place += kRows, panel",
        new="place += i + 1 < count ? kRows : 0, panel",
    ),
    _attention(
        name="a wrong coefficient of 2^x",
        path="kernels/native/cpp/vec16_bf16.h",
        old="6.9304484478e-1f",
        new="6.6304484478e-1f",
    ),
    _attention(
        name="a query sees one position too many",
        old="std::fill(scores + end,",
        new="std::fill(scores + std::min(end + 1, count),",
    ),
    _attention(
        name="a window begins a group late",
        old="std::max<int64_t>(0, begin_ - base) / kPositions",
        new="(std::max<int64_t>(0, begin_ - base) + 15) / kPositions",
    ),
    _attention(
        name="the sum of weights lacks groups of an incomplete four",
        old="if (v + i >= from && v + i < to) f(v + i, i);",
        new="if (v + i >= from && v + 4 <= to) f(v + i, i);",
    ),
    _attention(
        name="weights of the first group for all values",
        old="weights(r) + v * kPositions, kWeights",
        new="weights(r) + from * kPositions, kWeights",
    ),
    _attention(
        name="values beyond the context are not zeroed",
        old="if (in_twos || held < kPositions) {",
        new="if (in_twos) {",
    ),
    _attention(
        name="the second of two small blocks is widened to the first's place",
        old="widen_keys(position + i, tokens, keys + 2 * i, key_stride_);",
        new="widen_keys(position + i, tokens, keys, key_stride_);",
    ),
    _write(
        name="values of odd tokens go to the places of even ones",
        old="T* place = values + layout.value(offset, first);",
        new="T* place = values + layout.value(offset / 2 * 2, first);",
    ),
    _write(
        name="values are stored with the scale of keys",
        old="shape.v_scale, value[i]",
        new="shape.k_scale, value[i]",
    ),
    _write(
        name="ties are rounded up in e4m3",
        path="kernels/native/cpp/e4m3.h",
        old="magnitude + 0x7ffff + (magnitude >> 20 & 1)",
        new="magnitude + 0x80000",
    ),
    _write(
        name="small numbers of e4m3 lack their largest bit",
        path="kernels/native/cpp/e4m3.h",
        old="number = small & 0xf;",
        new="number = small & 0x7;",
    ),
    _attention(
        name="small numbers of e4m3 are widened like large ones",
        path="kernels/native/cpp/vec16.h",
        old="upper = _mm512_mask_shuffle_epi8(upper, is_small, small_uppers, low_bits);",
        new="",
    ),
    _attention(
        name="each block of a chunk is widened to the place of the first",
        path="kernels/attention/paged/cpp/tile_blocks.h",
        old="i += tokens, keys += tokens * size, values += tokens * size) {",
        new="i += tokens, values += tokens * size) {",
    ),
    _attention(
        name="a row's largest score counts positions that it does not see",
        path="kernels/attention/paged/cpp/tile.h",
        old="if (all_seen && how_.soft_cap <= 0) return",
        new="if (how_.soft_cap <= 0) return",
    ),
    _attention(
        name="values are read without their scale",
        path="kernels/attention/paged/cpp/tile.h",
        old="running.sums[r] / scores.value_scale",
        new="running.sums[r]",
    ),
)
_NO_FAULT = Fault(
    name="no fault", path="kernels/linear/dots/tile_dots.h", old="", new="", test=f"{_LINEAR} {_ATTENTION} {_WRITE}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    fault: Fault
    # pytest's: 0 if all tests passed, 1 if one failed, another number if they could not run; negative if a signal ended
    # it, as a kernel that reads beyond its memory may.
    exit_code: int
    seconds: float
    # The names of failed tests, or how pytest's output begins.
    told: str

    @property
    def is_right(self) -> bool:
        return self.exit_code == 0 if self.fault is _NO_FAULT else self.exit_code == 1 or self.exit_code < 0


def run(fault: Fault) -> Outcome:
    """Runs a fault's tests in a copy that has it. Raises ValueError if its text is not there once."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name in ("kernels", "worker", "tests"):
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", directory)
        if fault is not _NO_FAULT:
            _change(directory, fault)
        _change(directory, replace(fault, path="kernels/native/build.py", old='"-O3"', new='"-O1"'))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{directory}:{ROOT}",
            "OCTAVO_CACHE_DIR": str(directory / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *fault.test.split()]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")) or " passed" in line]
    return Outcome(
        fault=fault,
        exit_code=done.returncode,
        seconds=time.monotonic() - began,
        told=" | ".join(told) or ("" if done.returncode == 0 else (done.stdout + done.stderr)[:200].replace("\n", " ")),
    )


def _change(directory: Path, fault: Fault) -> None:
    source = directory / fault.path
    text = source.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.path} has {text.count(fault.old)} of {fault.old!r}")
    source.write_text(text.replace(fault.old, fault.new))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this text")
    only = parser.parse_args(arguments).only
    chosen = [fault for fault in FAULTS if only in fault.name]
    if not chosen:
        parser.error("--only: no fault's name has this text")
    is_right = True
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(run, (_NO_FAULT, *chosen)):
            is_right &= outcome.is_right
            word = "ok    " if outcome.is_right else "FAILED"
            print(f"{word} {outcome.seconds:5.0f} s  {outcome.fault.name}: {outcome.told}", flush=True)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
