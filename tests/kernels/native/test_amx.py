import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.backend import native_backend
from kernels.linear import PackedLinear
from kernels.linear.weights import Weight, quantize_int4, quantize_int8
from kernels.native import build as build_module
from kernels.native.build import PATHS, build, flags_of_this_cpu, path_of_this_cpu
from kernels.native.library import NativeKernels
from tests.support.kernels.emulation import with_emulated_tiles
from tests.support.kernels.kernel_paths import kernels_of

_AMX = next(path for path in PATHS if path.name == "amx-bf16")

# Linux permits no tiles while a thread has a signal stack that they do not fit on.
_ASK_WITH_A_SMALL_SIGNAL_STACK = """
import ctypes, logging
from kernels.native.amx import may_use_tiles

class Stack(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

logging.basicConfig(format="%(message)s")
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
print(may_use_tiles())
"""


def test_linux_refuses_tiles_and_the_warning_says_why() -> None:
    """Also where there is no AMX."""
    command = [sys.executable, "-c", _ASK_WITH_A_SMALL_SIGNAL_STACK]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert asked.stdout == "False\n", asked.stderr
    assert "Linux refuses its tiles (" in asked.stderr
    assert "signal stack" in asked.stderr


@pytest.mark.parametrize("is_permitted", [False, True])
def test_without_permission_the_path_that_is_next_in_speed_computes(
    is_permitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = " ".join(sorted(_AMX.cpu_flags))
    monkeypatch.setattr(Path, "read_text", lambda self: f"flags\t\t: {flags}\n")
    monkeypatch.setattr(build_module, "may_use_tiles", lambda: is_permitted)
    path = path_of_this_cpu()
    assert path is not None
    assert path.name == ("amx-bf16" if is_permitted else "avx512-vnni")


def test_tiles_are_no_number_of_rows() -> None:
    """A NaN, whatever its bits, makes its own row NaN and no other; rows beyond the last one of a tile do not count."""
    torch.manual_seed(0)
    kernels = kernels_of("amx-bf16")
    packed = PackedLinear(torch.randn(40, 70).bfloat16(), None, native_backend(torch.bfloat16, kernels))
    packed(torch.full((40, 70), torch.nan))  # what rows leave in memory
    x = torch.randn(35, 70)
    right = packed(x)
    assert right.isfinite().all()
    for bits in (0x7FC00000, -1, 0x7FFFFFFF, 0x7F800001):
        x[33, 69] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]
        y = packed(x)
        assert y[33].isnan().all(), hex(bits)
        assert torch.equal(y[:33], right[:33])
        assert torch.equal(y[34], right[34])


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_rows_beyond_the_last_of_a_tile_of_bytes_do_not_count(quantize: Callable[[torch.Tensor], Weight]) -> None:
    """A tile always computes 16 rows; those beyond the last are what an earlier call left. Below 32 rows no tiles are
    used, and the bits are the same."""
    torch.manual_seed(0)
    packed = PackedLinear(quantize(torch.randn(40, 70)), None, native_backend(torch.bfloat16, kernels_of("amx-bf16")))
    x = torch.randn(50, 70)
    alone = torch.cat([packed(row[None]) for row in x])
    for rows in (7, 8, 17, 31, 32, 33, 47, 49):
        packed(torch.full((50, 70), torch.nan))
        assert torch.equal(packed(x[:rows]), alone[:rows]), rows
    x[35, 3] = torch.nan
    y = packed(x[:41])
    assert y[35].isnan().all()
    assert torch.equal(y[:35], alone[:35])
    assert torch.equal(y[36:], alone[36:41])


def test_emulation_has_the_bits_of_the_hardware() -> None:
    """Only then do tests on other machines say anything about the order of the hardware's sums."""
    if not _AMX.cpu_flags <= flags_of_this_cpu():
        pytest.skip("a CPU without AMX")
    torch.manual_seed(0)
    emulation = with_emulated_tiles(_AMX)
    both = [kernels_of("amx-bf16"), NativeKernels(emulation, build(emulation))]
    for num_inputs in (3, 70, 577):
        weight, norm, x = torch.randn(37, num_inputs).bfloat16(), torch.randn(num_inputs), torch.randn(35, num_inputs)
        for each in (weight, quantize_int8(weight), quantize_int4(weight)):
            hardware, software = (
                PackedLinear(each, None, native_backend(torch.bfloat16, kernels), norm_I=norm, eps=1e-5)(x)
                for kernels in both
            )
            assert torch.equal(hardware, software), num_inputs
