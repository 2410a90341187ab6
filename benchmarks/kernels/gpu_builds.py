"""Compiles every configuration of every kernel that ships for sm_80, 86, 89, 90, 100 and 120, without a GPU.

    python -m benchmarks.kernels.gpu_builds [--op attention.paged] [--arch 90] [--processes 2] [--json]

Prints a table of registers, shared memory, instructions of a turn of the longest loop and wgmma; exits 1 if a build
spills, needs more than there is, or lacks an instruction that it should have. All takes some minutes with two compilers
at once, less once Triton's cache is filled.
"""

import argparse
import dataclasses
import json
import sys

from kernels.triton_common.kernel_build import ARCHS
from tests.support.kernels.ahead_of_time import NUM_PROCESSES, Compilations, objections, shipped_targets


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles all shipped kernels ahead of time.")
    parser.add_argument("--op", default="", help="only this op; default: all")
    parser.add_argument("--arch", type=int, choices=ARCHS, help="only this architecture; default: all")
    parser.add_argument("--processes", type=int, default=NUM_PROCESSES, help="compilers that run at once")
    parser.add_argument("--json", action="store_true", help="a line for each build")
    arguments = parser.parse_args()
    targets = [
        target
        for target in shipped_targets()
        if arguments.op in ("", target.op) and arguments.arch in (None, target.arch)
    ]
    if not targets:
        parser.error(
            f"--op {arguments.op}: must be one of {', '.join(sorted({each.op for each in shipped_targets()}))}"
        )
    compilations = Compilations(targets, arguments.processes)
    num_bad = 0
    try:
        for target in targets:
            result = compilations.results[str(target)].result()
            found = objections(target, result)
            num_bad += bool(found)
            if arguments.json:
                print(json.dumps({**dataclasses.asdict(result), "objections": found}), flush=True)
                continue
            wgmma = ", ".join(result.wgmma) or "-"
            numbers = f"{result.registers:4} registers {result.shared:7} B shared {result.longest_loop:5} a turn"
            what = "; ".join(found) or f"{numbers}, wgmma {wgmma}"
            print(f"sm_{target.arch} {target.op:16} {target.build:40} {what}", flush=True)
    finally:
        compilations.stop()
    print(f"{len(targets) - num_bad} of {len(targets)} builds are as they should be", file=sys.stderr)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
