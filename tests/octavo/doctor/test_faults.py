"""Each fault, put in the way of `octavo doctor`, is named by a line that says what to do."""

import os
import resource
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.options import Options
from kernels.native.build import path_of_this_cpu
from octavo.cluster.runtime_files import locked_runtime_dir
from octavo.doctor.machine import Check, Machine, State
from octavo.doctor.probe import TorchFacts
from octavo.doctor.subjects import cpu, limits, memory
from octavo.doctor.subjects.cpu import check_compiler
from octavo.doctor.subjects.disk import check_caches, check_disk
from octavo.doctor.subjects.limits import check_ports, check_runtime_directory
from octavo.doctor.subjects.packages import check_torch, check_triton
from tests.support.doctor import GIB, executable, in_child, machine, only
from tests.support.repository import ROOT

# --- Compiler


needs_kernels = pytest.mark.skipif(path_of_this_cpu() is None, reason="no kernels for this CPU")


@needs_kernels
def test_no_compiler_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = only(check_compiler(machine()), State.PROBLEM)
    assert found.found.startswith("no C++ compiler on PATH")
    assert "apt-get install g++" in found.advice


@needs_kernels
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "c++", "echo cc1plus: cannot allocate memory >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    assert "cannot allocate memory" in only(check_compiler(machine()), State.PROBLEM).found


def test_gpus_need_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in only(check_compiler(machine(device="cuda")), State.PROBLEM).found
    executable(tmp_path / "gcc", "true")
    assert str(tmp_path / "gcc") in only(check_compiler(machine(device="cuda")), State.OK).found


# --- Huge pages


@pytest.mark.skipif(not cpu.SETTING.is_file(), reason="a kernel without huge pages")
def test_huge_pages_that_are_turned_off_for_this_process() -> None:
    printed = in_child(
        "import ctypes\n"
        "assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE\n"
        "from configs.options import Options\n"
        "from octavo.doctor.machine import Machine\n"
        "from octavo.doctor.subjects.cpu import check_huge_pages, huge_pages_given\n"
        "print(huge_pages_given(4), *check_huge_pages(Machine(options=Options(device='cpu'))))\n"
    )
    assert printed.startswith("0 "), "the kernel gives none, which is what the line warns of"
    assert "State.NOTE" in printed
    assert "turned off for this process" in printed


def test_huge_pages_that_are_turned_off_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(cpu, "SETTING", setting)
    found = only(cpu.check_huge_pages(machine(device="cpu")), State.NOTE)
    assert found.advice == f"as root: echo madvise > {setting}"
    monkeypatch.setattr(cpu, "SETTING", tmp_path / "missing")
    assert "this kernel has none" in only(cpu.check_huge_pages(machine(device="cpu")), State.NOTE).found


# --- Ports and the runtime directory


def test_a_port_in_use_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = only(check_ports(machine(port=port, http_port=0, metrics_port=0)), State.PROBLEM)
    assert found.found.startswith(f"port: port {port} of 127.0.0.1 is in use by ")
    assert found.found.endswith(f"(pid {os.getpid()})")
    assert "--port, such as " in found.advice
    assert str(port) in only(check_ports(machine(port=port, http_port=0, metrics_port=0)), State.OK).found


def test_a_runtime_directory_in_use(tmp_path: Path) -> None:
    with locked_runtime_dir(tmp_path / "runtime"):
        found = only(check_runtime_directory(machine(runtime_dir=tmp_path / "runtime")), State.PROBLEM)
    assert f"(pid {os.getpid()})" in found.found
    only(check_runtime_directory(machine(runtime_dir=tmp_path / "runtime")), State.OK)


# --- Disks


def test_a_full_disk(tmp_path: Path) -> None:
    wrapped = ("unshare", "-Urm")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*wrapped, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no user namespaces here, in which a small disk could be mounted")
    printed = in_child(
        "import os, subprocess, sys\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256k', 'none', sys.argv[1]], check=True)\n"
        "os.environ['OCTAVO_CACHE_DIR'] = sys.argv[1]\n"
        "from octavo.doctor.subjects.disk import check_disk\n"
        "from tests.support.doctor import machine\n"
        "print(*check_disk(machine()))\n",
        str(tmp_path),
        wrapped=wrapped,
    )
    assert "State.PROBLEM" in printed
    assert f"caches: {tmp_path} has 0 MiB free; a start needs 64 MiB" in printed


@pytest.mark.parametrize(
    ("left", "files", "state", "words"),
    [
        (2**20, 100, State.PROBLEM, "1 MiB free; a start needs 64 MiB"),
        (GIB, 0, State.PROBLEM, "no inodes are left"),
        (GIB, 100, State.NOTE, "packed weights of 1.0 GiB are kept if twice as much is"),
        (4 * GIB, 100, State.OK, "4.0 GiB free"),
    ],
)
def test_disks_with_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, files: int, state: State, words: str
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    read = os.statvfs_result((4096, 4096, 2**30, left // 4096, left // 4096, 2**20, files, files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: read)
    assert words in only(check_disk(machine(device="cpu")), state).found


def test_a_cache_directory_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file"))
    assert "set OCTAVO_CACHE_DIR" in only(check_caches(machine()), State.PROBLEM).advice


# --- Versions


def distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    """An installed package, as far as its metadata."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_an_old_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "triton", "3.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = only(check_triton(machine(device="cuda")), State.PROBLEM)
    assert found.found.startswith("3.1.0 does not fit: octavo ")
    assert found.advice == "pip install -c constraints/cuda.txt triton"
    assert "workers on CPUs do not use it" in only(check_triton(machine(device="cpu")), State.NOTE).found


def test_a_triton_that_pytorch_does_not_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "triton", "3.9.0")
    distribution(tmp_path, "torch", "2.13.0", "triton==3.7.1")
    monkeypatch.syspath_prepend(tmp_path)
    found = only(check_triton(machine(TorchFacts(cuda="13.0"), device="cuda")), State.PROBLEM)
    assert found.found == "3.9.0 does not fit: torch 2.13.0 needs ==3.7.1"
    assert found.advice == "pip install -c constraints/cuda.txt triton"


def test_an_old_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "torch", "2.4.1")
    monkeypatch.syspath_prepend(tmp_path)
    assert only(check_torch(machine()), State.PROBLEM).found.startswith("2.4.1 (CPU build) is not <2.14,>=2.11")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('libtorch_cpu.so: undefined symbol')", "ImportError: libtorch_cpu.so: undefined symbol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process was killed by signal 11"),
        ("import time; time.sleep(60)", "it does not end within 2 s"),
    ],
)
def test_a_pytorch_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    broken = Machine(options=Options(), probe_timeout=2.0 if "sleep" in program else 60.0)
    found = only(check_torch(broken), State.PROBLEM)
    assert said in found.found
    assert "--force-reinstall torch" in found.advice
    assert "repair PyTorch" in only(memory.check_memory(broken), State.PROBLEM).advice


# --- Memory


def host_line(machine: Machine) -> Check:
    return next(check for check in memory.check_memory(machine) if check.subject == "memory")


def test_too_little_memory_and_the_advice_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    room = memory.HostMemory(available=4 * GIB, limit="8.0 GiB of this machine")
    monkeypatch.setattr(memory, "host_memory", lambda: room)
    found = host_line(machine(device="cpu", kv_cache_memory=8))
    assert found.state is State.PROBLEM
    assert "4.0 GiB are available of 8.0 GiB of this machine" in found.found
    advised = float(found.advice.removeprefix("use kv_cache_memory=").partition(",")[0])
    assert 1 < advised < 4
    assert host_line(machine(device="cpu", kv_cache_memory=advised)).state is State.OK


def test_more_than_any_machine_has() -> None:
    found = host_line(machine(device="cpu", data_parallel_size=64, kv_cache_memory=4096))
    assert found.state is State.PROBLEM
    assert "data_parallel_size=32 or less" in found.advice


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": "2147483648",
            "memory.current": "1610612736",
            "memory.stat": "inactive_file 536870912\n",
        },
        {
            "memory.limit_in_bytes": "2147483648",
            "memory.usage_in_bytes": "1610612736",
            "memory.stat": "inactive_file 5\ntotal_inactive_file 536870912\n",
        },
    ],
)
def test_the_limit_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    room = memory.memory_room(tmp_path)
    assert room == memory.HostMemory(available=GIB, limit="2.0 GiB of its control group")
    monkeypatch.setattr(memory, "control_groups", lambda controller: [tmp_path])
    found = host_line(machine(device="cpu"))
    assert found.state is State.PROBLEM
    assert "1.0 GiB are available of 2.0 GiB of its control group" in found.found


def test_a_kv_cache_without_room() -> None:
    def lines(**options: Any) -> dict[str, Check]:
        return {check.subject: check for check in memory.check_memory(machine(device="cpu", **options))}

    assert "holds no KV block of 1 MiB" in lines(kv_cache_memory=0.0001)["KV cache"].found
    assert lines(kv_cache_memory=0.1)["KV cache"].state is State.NOTE
    refused = lines(kv_cache_memory=0.1, max_model_len=8192)["KV cache"]
    assert refused.state is State.PROBLEM
    assert "1,616 tokens, less than one sequence of 8,192" in refused.found
    enough = float(refused.advice.removeprefix("use kv_cache_memory=").partition(",")[0])
    assert lines(kv_cache_memory=enough, max_model_len=8192)["KV cache"].state is State.OK


# --- Limits


def limited(name: int, soft: int, check: str) -> str:
    return in_child(
        "from octavo.doctor.subjects import limits\n"
        "from tests.support.doctor import machine\n"
        f"print(*limits.{check}(machine()))\n",
        before=partial(resource.setrlimit, name, (soft, soft)),
    )


def test_a_low_limit_of_open_files() -> None:
    few = limited(resource.RLIMIT_NOFILE, 100, "check_open_files")
    assert "State.PROBLEM" in few
    assert "at most 100 a process; a process of this cluster needs 140" in few
    usual = limited(resource.RLIMIT_NOFILE, 1024, "check_open_files")
    assert "State.NOTE" in usual
    assert "a router can hold 884 connections, fewer than its max_streams=16384" in usual
    assert "raise the hard limit of 1024 to 16524" in usual


def test_a_control_group_with_few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pids.max").write_text("100\n")
    (tmp_path / "pids.current").write_text("70\n")
    monkeypatch.setattr(limits, "control_groups", lambda controller: [tmp_path])
    found = only(limits.check_processes(machine()), State.PROBLEM)
    assert "which leaves 30 threads" in found.found
    (tmp_path / "pids.max").write_text("max\n")
    assert "of a control group" not in only(limits.check_processes(machine()), State.OK).found
