"""Compiles the kernel builds that ship, for GPUs that this machine lacks, in processes that don't interpret.

    python -m tests.support.kernels.ahead_of_time

reads lines "op name arch" and prints for each a `Compiled` as a line of JSON. Triton keeps the results in its usual
cache, by source, signature and options.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kernels.triton_common.kernel_build import KernelBuild
from tests.support.kernels.recorded_loops import RECORDED_ARCH, LoopLimit, instructions_per_number, recorded_loops
from tests.support.kernels.sass import Loop, cuobjdump, disassembled, flaws, innermost_loops
from tests.support.repository import ROOT

# Bytes of shared memory that one thread block may have.
SHARED_MEMORY_LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Bytes of stack, which innermost loops must not touch. For sm_120, ptxas of Triton 3.9 keeps two to five numbers there,
# in five builds: stored before the loops, and loaded behind them or once for each part or piece of work.
_TOLERATED_STACK = {120: 24}
# An instruction names a register with 8 bits.
MAX_REGISTERS = 255
NUM_PROCESSES = 2
# The architecture that the sample has all builds for, and those that it has all kernels for.
_EACH_BUILD, _EACH_KERNEL = 90, (80, 89)


@dataclass(frozen=True, slots=True)
class Target:
    op: str
    build: str
    arch: int

    def __str__(self) -> str:
        return f"{self.op} {self.build} {self.arch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    target: str
    # If set, compilation failed and the other fields are empty.
    error: str = ""
    registers: int = 0
    # Bytes of the stack and of local memory, where spilled registers go, and of shared memory.
    stack: int = 0
    local: int = 0
    shared: int = 0
    # Shapes, such as "m64n128k16".
    wgmma: list[str] = dataclasses.field(default_factory=list[str])
    has_vectors: bool = False
    # The innermost loops, if there are tensor core instructions.
    loops: list[Loop] = dataclasses.field(default_factory=list[Loop])
    # Cost of the longest one, see recorded_loops.
    instructions_per_number: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> "Compiled":
        """text: of a Compiled, and maybe of what is objected to."""
        fields = json.loads(text)
        fields.pop("objections", None)
        return cls(**{**fields, "loops": [Loop(**loop) for loop in fields["loops"]]})

    @property
    def longest_loop(self) -> int:
        """Instructions of a turn of the longest loop around tensor cores; 0 if there is none."""
        return max((loop.instructions for loop in self.loops if loop.tensor_cores), default=0)

    @property
    def plain_loads(self) -> int:
        """The most plain loads of a loop around tensor cores."""
        return max((loop.plain_loads for loop in self.loops if loop.tensor_cores), default=0)


@lru_cache
def builds_of(op: str) -> dict[str, KernelBuild]:
    """op: a folder of kernels, or a module of tests."""
    module = op if op.startswith("tests.") else f"kernels.{op}.builds"
    builds: list[KernelBuild] = importlib.import_module(module).shipped()
    by_name = {build.name: build for build in builds}
    assert len(by_name) == len(builds), f"two builds of {op} have one name"
    return by_name


def shipped_targets() -> list[Target]:
    """All targets that ship."""
    kernels = ROOT / "kernels"
    ops = sorted(".".join(path.parent.relative_to(kernels).parts) for path in kernels.rglob("builds.py"))
    return [Target(op, name, arch) for op in ops for name, build in builds_of(op).items() for arch in build.archs]


def sampled_targets() -> list[Target]:
    """Targets such that each build is compiled for sm_90, whatever the architecture in its name, and each kernel for
    sm_80 and sm_89, too; kernels with tiles of their own for each architecture for all of them."""
    sample: list[Target] = []
    met: set[tuple[int, object]] = set()
    # Some builds are for GPUs without e4m3 alone.
    covered = {configuration(target) for target in shipped_targets() if target.arch == _EACH_BUILD}
    for target in shipped_targets():
        build = builds_of(target.op)[target.build]
        kernel = target.arch, build.fn
        is_first = kernel not in met and (target.arch in _EACH_KERNEL or len(build.archs) == 1)
        if target.arch == _EACH_BUILD or is_first or configuration(target) not in covered:
            sample.append(target)
            met.add(kernel)
            covered.add(configuration(target))
    return sample


def configuration(target: Target) -> tuple[str, str]:
    """Op and build without the architecture that some names carry."""
    return target.op, target.build.removesuffix(f"-sm{target.arch}")


def objections(target: Target, result: Compiled) -> list[str]:
    """The faults of a build; empty if there are none."""
    if result.error:
        return [result.error]
    build = builds_of(target.op)[target.build]
    found: list[str] = []
    if result.stack > _TOLERATED_STACK.get(target.arch, 0) or result.local:
        found.append(f"spills: {result.stack} bytes of stack, {result.local} of local memory")
    if target.arch != RECORDED_ARCH:
        found += [
            f"{loop.spills} accesses to spilled registers in an innermost loop" for loop in result.loops if loop.spills
        ]
    if not 0 < result.registers <= MAX_REGISTERS:
        found.append(f"{result.registers} registers")
    if result.shared > SHARED_MEMORY_LIMITS[target.arch]:
        found.append(f"{result.shared} bytes of shared memory, of {SHARED_MEMORY_LIMITS[target.arch]}")
    if target.arch == 90 and build.expects_wgmma and not result.wgmma:
        found.append("no wgmma")
    if target.arch == 90 and build.wgmma_shape and result.wgmma != [build.wgmma_shape]:
        found.append(f"wgmma of {', '.join(result.wgmma)}, not of {build.wgmma_shape} alone")
    if build.expects_vectors and not result.has_vectors:
        found.append("no 16-byte accesses")
    if target.arch == RECORDED_ARCH:
        limit = recorded_loops().get(configuration(target), LoopLimit())
        found += flaws(result.loops, plain_loads=limit.plain_loads)
        cost = result.instructions_per_number
        if cost > limit.instructions:
            found.append(f"{cost:.2f} instructions a thread for each token or weight, more than {limit.instructions}")
    return found


class Compilations:
    """Compiles targets in background processes, which start at construction."""

    def __init__(self, targets: Sequence[Target], num_processes: int = NUM_PROCESSES) -> None:
        # Keys: str(target).
        self.results: dict[str, Future[Compiled]] = {str(target): Future() for target in targets}
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        for part in range(num_processes):
            names = [str(target) for target in targets[part::num_processes]]
            if names:
                process = _start()
                thread = threading.Thread(target=self._follow, args=(process, names))
                thread.start()
                self._processes.append(process)
                self._threads.append(thread)

    def stop(self) -> None:
        """Kills the compilations that still run."""
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()

    def _follow(self, process: "subprocess.Popen[str]", names: list[str]) -> None:
        # All requests together fit into a pipe.
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            process.stdin.write("".join(f"{name}\n" for name in names))
            process.stdin.close()
            for line in process.stdout:
                compiled = Compiled.from_json(line)
                self.results[compiled.target].set_result(compiled)
        for name in names:
            if not self.results[name].done():
                error = f"the compiler died, exit code {process.returncode}"
                self.results[name].set_result(Compiled(target=name, error=error))


def _start() -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.kernels.ahead_of_time"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def compile_here(target: Target) -> Compiled:
    """Compiles in this process, which must not interpret."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert not knobs.runtime.interpret
    build = builds_of(target.op)[target.build]
    source = ASTSource(
        fn=build.fn, signature=_full_signature(build), constexprs=dict(build.constexprs), attrs=_attributes(build)
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    kernel: Any = triton.compile(source, target=GPUTarget("cuda", target.arch, 32), options=options)
    usage = _resource_usage(kernel.asm["cubin"])
    # Disassembling takes as long as compiling a small kernel.
    has_tensor_cores = "mma.sync" in kernel.asm["ptx"] or "wgmma" in kernel.asm["ptx"]
    compiled = Compiled(
        target=str(target),
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=kernel.metadata.shared,
        wgmma=sorted({*re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", kernel.asm["ptx"])}),
        has_vectors="ld.global.v4.b32" in kernel.asm["ptx"] and "st.global.v" in kernel.asm["ptx"],
        loops=innermost_loops(disassembled(kernel.asm["cubin"])) if has_tensor_cores else [],
    )
    return replace(compiled, instructions_per_number=instructions_per_number(build, compiled.longest_loop))


def _full_signature(build: KernelBuild) -> dict[str, str]:
    """The type of each argument, in the order of the function's arguments."""
    names: list[str] = build.fn.arg_names
    unknown = {*build.signature, *build.constexprs} - {*names}
    assert not unknown, f"{build.name}: the kernel has no argument {unknown}"
    missing = {*names} - {*build.signature, *build.constexprs}
    assert not missing, f"{build.name}: no type or value for {missing}"
    return {name: build.signature.get(name, "constexpr") for name in names}


def _attributes(build: KernelBuild) -> dict[tuple[int, ...], list[list[Any]]]:
    aligned = {name for name, kind in build.signature.items() if kind.startswith("*")} | {*build.multiples_of_16}
    return {(build.fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in sorted(aligned)}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    text = cuobjdump(cubin, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def _requested(lines: Iterator[str]) -> Iterator[Target]:
    for line in lines:
        op, build, arch = line.split()
        yield Target(op, build, int(arch))


def main() -> None:
    # Other tests should not be slowed down.
    os.nice(10)
    for target in _requested(iter(sys.stdin)):
        try:
            compiled = compile_here(target)
        except Exception as error:  # noqa: BLE001 - whatever stops the compiler is this build's result
            compiled = Compiled(target=str(target), error=f"{type(error).__name__}: {error}")
        print(json.dumps(dataclasses.asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
