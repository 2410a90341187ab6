"""Peak rates of this machine: runs machine_peaks.cpp beside this file, compiled like the kernels."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernels.native.build import path_of_this_cpu

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePeaks:
    """Peak rates per second, with some number of threads."""

    # Bytes read from memory, in order; and in blocks of 4 KiB in another order, as attention reads KV.
    read: float
    read_blocks: float
    # Operations (a product and its addition are two), by the type that is multiplied: float32; int16 (vpmaddwd) and
    # int8_pairs (vpmaddubsw) with AVX2; bfloat16 (vdpbf16ps) and int8 (vpdpbusd) with AVX-512; bfloat16_tiles and
    # int8_tiles (32 inputs, a block) with AMX.
    operations: dict[str, float]


def measure_peaks(threads: int) -> MachinePeaks:
    """Measures for some seconds. Raises RuntimeError if there is no compiler, or no path for the CPU."""
    path = path_of_this_cpu()
    if path is None:
        raise RuntimeError("floors need a CPU with AVX2")
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "peaks"
        command = ["c++", "-O2", "-std=c++17", "-pthread", f"-I{_ROOT}", *path.compiler_flags]
        command += [str(source), "-o", str(program)]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise RuntimeError("floors need a C++ compiler: apt-get install g++") from None
        output = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    rates: dict[str, float] = json.loads(output)
    return MachinePeaks(read=rates.pop("read"), read_blocks=rates.pop("read_blocks"), operations=rates)
