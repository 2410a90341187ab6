"""Compiles all kernels, and runs all tests of GPU code in the interpreter, with each Triton version that users get.

    python -m benchmarks.kernels.triton_versions [--versions 3.6.0 3.7.1] [--arch 90] [--builds-only] [--record]

Each version but the installed one gets an environment of its own, made by pip in --folder and kept there, on top of
this environment's packages. Prints stack bytes, registers and instructions of the longest loop of each build; exits 1
if a build is not as it should be or a test fails.
--record writes the table of loops anew that tests compare with. On two cores a version takes 1 to 2 minutes for an
architecture, and 6 for the tests.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

from kernels.native.cache_directory import cache_directory
from kernels.triton_common.kernel_build import ARCHS
from tests.support.kernels.ahead_of_time import Compiled, Target, configuration, shipped_targets
from tests.support.kernels.recorded_loops import RECORDED_ARCH, LoopLimit, write_recorded_loops
from tests.support.repository import ROOT

# Triton 3.6 and 3.7 come with PyTorch's CUDA builds; constraints/cpu.txt has the version that tests run with.
_VERSIONS = ("3.6.0", "3.7.1")
Results = dict[str, tuple[Compiled, list[str]]]
_TESTS = ("tests/kernels", "tests/worker/gpu", "tests/worker/gpu_models", "tests/integration/worker")
_WHICH = "(triton or gpu) and not ahead and not fault"


def environment(version: str, folder: Path) -> str:
    """The Python of an environment that has this Triton version. Makes it if need be."""
    if version == triton.__version__:
        return sys.executable
    place = folder / version
    python = place / "bin" / "python"
    done = place / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        packages = subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        # Searched behind the environment's own packages.
        (Path(packages.strip()) / "zz_beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", f"triton=={version}"], check=True)
        done.touch()
    return str(python)


def compile_all(python: str, arch: int | None) -> Results:
    """Results by str(target), with what that version objects to: which tiles a build has may depend on it."""
    command = [python, "-m", "benchmarks.kernels.gpu_builds", "--json"]
    command += [] if arch is None else ["--arch", str(arch)]
    process = subprocess.run(command, cwd=ROOT, env=_variables(), stdout=subprocess.PIPE, text=True, check=False)
    found: Results = {}
    for line in process.stdout.splitlines():
        fields = json.loads(line)
        found[fields["target"]] = Compiled.from_json(line), fields["objections"]
    return found


def passes_tests(python: str) -> bool:
    environment = {**_variables(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    in_processes = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *in_processes, *_TESTS, "-k", _WHICH]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def _variables() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, "PYTHONPATH": str(ROOT)}


def print_table(targets: Sequence[Target], by_version: Mapping[str, Results]) -> int:
    """Returns the number of builds that are not as they should be."""
    print(f"{'stack B / registers / instructions a turn':56}" + "".join(f"{version:>20}" for version in by_version))
    num_bad = 0
    for target in targets:
        cells: list[str] = []
        for version, results in by_version.items():
            result, found = results.get(str(target), (Compiled(target=str(target)), ["not compiled"]))
            num_bad += bool(found)
            numbers = f"{result.stack} / {result.registers} / {result.longest_loop}{' *' if found else ''}"
            cells.append(f"{numbers:>20}")
            for objection in found:
                print(f"{target}, Triton {version}: {objection}", file=sys.stderr)
        print(f"{target!s:56}" + "".join(cells), flush=True)
    return num_bad


def record(targets: Sequence[Target], by_version: Mapping[str, Results]) -> None:
    limits: dict[tuple[str, str], LoopLimit] = {}
    for target in targets:
        results = [results[str(target)][0] for results in by_version.values()]
        if target.arch == RECORDED_ARCH and any(result.longest_loop for result in results):
            limits[configuration(target)] = LoopLimit(
                instructions=max(result.instructions_per_number for result in results),
                plain_loads=max(result.plain_loads for result in results),
            )
    write_recorded_loops(limits)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles and tests kernels with several Triton versions.")
    parser.add_argument("--versions", nargs="*", default=_VERSIONS, help="beside the installed one")
    parser.add_argument("--arch", type=int, choices=ARCHS, help="only this architecture; default: all")
    parser.add_argument("--folder", type=Path, default=cache_directory("triton_versions"), help="of the environments")
    parser.add_argument("--builds-only", action="store_true", help="run no tests")
    parser.add_argument("--record", action="store_true", help="write the table of loops anew, from all these versions")
    arguments = parser.parse_args()
    targets = [target for target in shipped_targets() if arguments.arch in (None, target.arch)]
    pythons = {
        version: environment(version, arguments.folder)
        for version in dict.fromkeys((*arguments.versions, triton.__version__))
    }
    by_version = {version: compile_all(python, arguments.arch) for version, python in pythons.items()}
    if arguments.record:
        record(targets, by_version)
        # Objections once more, by the new table; Triton has kept all results.
        by_version = {version: compile_all(python, arguments.arch) for version, python in pythons.items()}
    num_bad = print_table(targets, by_version)
    print(f"{num_bad} builds are not as they should be", file=sys.stderr)
    failed = [] if arguments.builds_only else [version for version in pythons if not passes_tests(pythons[version])]
    if failed:
        print(f"tests failed with Triton {', '.join(failed)}", file=sys.stderr)
    return 1 if num_bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
