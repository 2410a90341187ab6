"""Building the C++ kernels: once, in a private cache, checked at load; without a compiler PyTorch computes."""

import logging
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import cpu_backend as cpu_backend_module
from kernels.cpu_backend import cpu_backend, native_kernels
from kernels.linear import check as linear_check
from kernels.native import build as build_module
from kernels.native.build import PATHS, BuildError, NativePath, build, path_of_this_cpu
from kernels.native.cache_directory import cache_directory
from kernels.native.library import NativeKernelsError
from tests.support.kernels.kernel_paths import NATIVE_KINDS, kernels_of, native

NATIVE = Path(build_module.__file__).parent / "cpp"


@pytest.fixture
def path() -> NativePath:
    native()
    found = path_of_this_cpu()
    assert found is not None
    return found


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    """Loads the kernels anew within the test; later tests get the real ones again."""
    native_kernels.cache_clear()
    yield
    native_kernels.cache_clear()


def _fake_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Installs a `c++` that prints a version, records each call and then runs `body`. Returns the record of calls."""
    calls = directory / "calls"
    compiler = directory / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo fake 1.0\necho call >>{calls}\n{body}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


_WRITE_OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo library >"$2"'


def test_built_once_by_however_many_and_kept_private(
    path: NativePath, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_compiler(tmp_path, monkeypatch, _WRITE_OUTPUT)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(build(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert calls.read_text().count("call") == 1
    assert results[0].read_text() == "library\n"
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert sorted(entry.name for entry in own_cache.iterdir()) == sorted([results[0].name, "lock"])


def test_a_shipped_library_needs_no_compiler_and_no_cache(
    path: NativePath, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_SHIPPED", tmp_path / "shipped")
    calls = _fake_compiler(tmp_path, monkeypatch, _WRITE_OUTPUT)
    shipped = build_module.ship(path)
    # Images are built by root and run by another user.
    assert stat.S_IMODE(shipped.stat().st_mode) == 0o755
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    assert build(path) == shipped
    assert not own_cache.exists()

    # One of other sources is not taken, and there is no compiler for these.
    monkeypatch.setattr(build_module, "_FLAGS", (*build_module._FLAGS, "-O1"))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(path)
    assert calls.read_text().count("call") == 1


def test_other_sources_are_another_library(
    path: NativePath, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_compiler(tmp_path, monkeypatch, _WRITE_OUTPUT)
    first = build(path)
    monkeypatch.setattr(build_module, "_sources", lambda: [NATIVE / "pool.cpp"])
    assert build(path) != first
    assert calls.read_text().count("call") == 2


def test_a_failed_build_leaves_nothing_and_says_what_the_compiler_said(
    path: NativePath, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_compiler(tmp_path, monkeypatch, "echo unknown option -mfoo >&2; exit 1")
    with pytest.raises(BuildError, match="unknown option -mfoo"):
        build(path)
    assert [entry.name for entry in own_cache.iterdir()] == ["lock"]


def test_a_directory_open_to_others_is_closed(own_cache: Path) -> None:
    """Anyone with write access to it could run code in a worker."""
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    cache_directory("kernels")
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700


def test_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("kernels") == tmp_path / "octavo" / "kernels"


@pytest.mark.usefixtures("own_cache", "loaded_anew")
def test_without_a_compiler_pytorch_computes_and_one_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if path_of_this_cpu() is None:
        pytest.skip("no kernels for this CPU")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cpu_backend(torch.float32, 64).name == "cpu-onednn-float32"
    assert len(caplog.messages) == 1
    assert "apt-get install g++" in caplog.text


@pytest.mark.usefixtures("loaded_anew")
def test_kernels_that_compute_wrongly_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is made wrong by a thousandth, which equals wrong kernels."""
    native()
    native_kernels.cache_clear()
    right = linear_check.linear
    monkeypatch.setattr(linear_check, "linear", lambda *arguments: right(*arguments) * 1.001)
    with pytest.raises(NativeKernelsError, match=r"linear of torch.float32, gated by silu is off by"):
        native_kernels()


def test_head_sizes_that_fill_no_vector_are_left_to_pytorch() -> None:
    assert cpu_backend(torch.float32, 12).native is None
    with pytest.raises(ValueError, match=r"kv_cache_dtype=fp8 needs the C.. kernels, and heads of a multiple of 8"):
        cpu_backend(torch.bfloat16, 12, torch.float8_e4m3fn)


def test_the_path_is_the_first_that_the_cpu_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "may_use_tiles", lambda: True)
    for expected in PATHS:
        flags = " ".join(sorted(expected.cpu_flags | {"sse"}))
        monkeypatch.setattr(Path, "read_text", lambda self, flags=flags: f"processor: 0\nflags\t\t: {flags}\n")
        assert path_of_this_cpu() is expected
    monkeypatch.setattr(Path, "read_text", lambda self: "flags\t\t: sse sse2\n")
    assert path_of_this_cpu() is None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_path_compiles_without_a_warning(path: NativePath) -> None:
    """Including paths that this machine cannot run."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *path.compiler_flags]
    result = subprocess.run([*command, NATIVE / path.source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_every_path_passes_the_check_at_load(kind: str) -> None:
    cpu_backend_module.check_kernels(kernels_of(kind))


def test_torch_keeps_its_thread_pool_to_itself(path: NativePath) -> None:
    """A second OpenMP runtime in the process would have threads that spin beside torch's."""
    if sys.platform != "linux" or shutil.which("readelf") is None:
        pytest.skip("no readelf")
    needed = subprocess.run(["readelf", "-d", str(build(path))], capture_output=True, text=True, check=True).stdout
    assert "gomp" not in needed
    assert "libomp" not in needed


def test_kernels_are_loaded_once() -> None:
    assert cpu_backend_module.native_kernels() is native_kernels()


def test_a_lock_that_another_process_keeps_is_waited_for_in_vain(
    own_cache: Path, path: NativePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a process had been stopped while it compiled."""
    monkeypatch.setattr(build_module, "_LOCK_TIMEOUT_S", 0.2)
    _fake_compiler(tmp_path, monkeypatch, _WRITE_OUTPUT)
    lock = cache_directory("kernels") / "lock"
    with build_module._locked(lock), pytest.raises(BuildError, match=r"lock.* for 0\.2 s"):
        build(path)


def test_a_compiler_that_does_not_say_its_version_is_an_error(
    own_cache: Path, path: NativePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_VERSION_TIMEOUT_S", 0.2)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="--version"):
        build(path)
