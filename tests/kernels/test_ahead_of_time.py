"""Kernels as they ship, compiled without a GPU: all builds for sm_90, all kernels for sm_80 and sm_89, too.

Configurations that spill, exceed the shared memory or lose wgmma would run slowly or not at all on GPUs, where no test
runs. So would loops that read shared memory byte by byte or wait for memory, which no result shows. This is a sample,
with the Triton that is installed; `python -m benchmarks.kernels.triton_versions` compiles all, with others, too.
"""

from concurrent.futures import Future

import pytest

from kernels.triton_common.kernel_build import ARCHS
from tests.support.kernels.ahead_of_time import (
    Compiled,
    Target,
    builds_of,
    configuration,
    objections,
    sampled_targets,
    shipped_targets,
)
from tests.support.kernels.recorded_loops import RECORDED_ARCH, recorded_loops
from tests.support.kernels.sass import flaws, innermost_loops

_BY_NUMBERS = Target("tests.support.kernels.slow_builds", "decode-llama-8b-fp8-by-numbers-sm90", 90)
_SCALES = Target("tests.support.kernels.slow_builds", "scales-of-2-bytes", 90)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", sampled_targets(), ids=lambda target: str(target).replace(" ", "-"))
def test_fits_the_gpu(target: Target, compilations: dict[str, "Future[Compiled]"]) -> None:
    result = compilations[str(target)].result()
    assert not objections(target, result), result


def test_the_sample_has_each_build_and_each_kernel() -> None:
    """Each configuration that ships, whatever architecture its name carries; and each kernel for three GPUs."""
    sample, all_targets = sampled_targets(), shipped_targets()
    assert {configuration(each) for each in sample} == {configuration(each) for each in all_targets}

    def kernels(targets: list[Target], arch: int) -> set[object]:
        return {builds_of(each.op)[each.build].fn for each in targets if each.arch == arch}

    assert {each.arch for each in all_targets} == {*ARCHS}
    for arch in (80, 89, 90):
        assert kernels(sample, arch) == kernels(all_targets, arch)


def test_the_table_of_loops_has_no_build_that_is_gone() -> None:
    builds = {configuration(each) for each in shipped_targets() if each.arch == RECORDED_ARCH}
    assert {*recorded_loops()} <= builds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [_BY_NUMBERS], ids=["e4m3"])
def test_finds_values_that_are_read_byte_by_byte(target: Target, compilations: dict[str, "Future[Compiled]"]) -> None:
    """The fault of decodes from e4m3 caches before they were read by pairs."""
    found = flaws(compilations[str(target)].result().loops)
    assert any("loads of single bytes from shared memory" in each for each in found)
    assert any("asynchronous copies of less than 16 bytes" in each for each in found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [_SCALES], ids=["scales"])
def test_finds_scales_that_are_loaded_within_the_loop(
    target: Target, compilations: dict[str, "Future[Compiled]"]
) -> None:
    """The fault of the 4-bit GEMM before its scales had 4 bytes with their minima."""
    found = flaws(compilations[str(target)].result().loops)
    assert any("plain loads in a loop around tensor cores" in each for each in found)


# An outer and an inner loop as cuobjdump prints them, and the jump to itself that ends a kernel.
_SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;                              /* 0x0000000000007919 */
        /*0010*/                   LDS.U8 R1, [R0] ;                               /* 0x0000000000007919 */
{body}
        /*0100*/                   HMMA.16816.F32 R4, R8, R12, R4 ;                /* 0x0000000000007919 */
        /*0110*/              @!P0 BRA 0x20 ;                                      /* 0x0000000000007919 */
        /*0120*/               @P1 BRA 0x10 ;                                      /* 0x0000000000007919 */
        /*0130*/                   BRA 0x130;                                      /* 0x0000000000007919 */
"""
_COPY = "LDGSTS.E.BYPASS.128 [R10], desc[UR20][R70.64], P5"


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        ((_COPY, "@P0 LDS.128 R4, [R2]", "LDGSTS.E [R250+0x1a000], desc[UR20][R20.64], P2"), []),
        (("@!P2 LDS.U8 R4, [R2+0x10]",), ["1 loads of single bytes from shared memory in an innermost loop"]),
        (("LDL R36, [R1]", "STL [R1+0x4], R2"), ["2 accesses to spilled registers in an innermost loop"]),
        (("LDG.E.U16 R8, desc[UR4][R2.64]",), ["1 plain loads in a loop around tensor cores, not 0"]),
        ((_COPY, "LDGSTS.E.64 [R10], desc[UR2][R7.64]"), ["1 asynchronous copies of less than 16 bytes beside 1"]),
    ],
    ids=["nothing", "bytes", "spills", "plain loads", "narrow copies"],
)
def test_the_lint_reads_loops(instructions: tuple[str, ...], found: list[str]) -> None:
    """In the inner loop alone: the outer one loads a byte, too, which costs little."""
    body = "\n".join(f"        /*{32 + 16 * n:04x}*/ {text} ;" for n, text in enumerate(instructions))
    loops = innermost_loops(_SASS.format(body=body))
    assert [loop.instructions for loop in loops] == [len(instructions) + 2]
    assert flaws(loops) == found
