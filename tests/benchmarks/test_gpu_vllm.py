"""The pruning of binaries for a GPU machine without a network."""

import struct

from benchmarks.gpu.vllm.prune import entries, is_for_head_size_128, prune

PTX, MACHINE_CODE = 1, 2


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHI", header, 0, kind, 0x101, len(header))
    struct.pack_into("<Q", header, 8, len(payload))
    struct.pack_into("<I", header, 28, arch)
    return bytes(header) + payload


def fatbin(*parts: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(parts))) + b"".join(parts)


def test_only_code_for_one_architecture_stays_and_nothing_moves() -> None:
    kept, flash = b"kept" * 8, b"flash_fwd_hdim64_bf16_sm90" * 2
    ours = fatbin(entry(MACHINE_CODE, 80, b"old!" * 16), entry(MACHINE_CODE, 90, kept), entry(PTX, 90, b"text" * 4))
    others = fatbin(entry(MACHINE_CODE, 90, flash), entry(MACHINE_CODE, 100, b"new!" * 5))
    # The magic number alone is no fatbin.
    original = b"\x7fELF" + struct.pack("<I", 0xBA55ED50) + b"code" * 10 + ours + b"between" + others + b"end"
    data = bytearray(original)
    sizes = prune(data, 90, is_for_head_size_128)
    assert sizes == {"sm_80": 64, "kept": len(kept), "PTX": 16, "not wanted": len(flash), "sm_100": 20}
    assert len(data) == len(original)
    assert [(each.kind, each.arch) for each in entries(data)] == [
        (MACHINE_CODE, 80),
        (MACHINE_CODE, 90),
        (PTX, 90),
        (MACHINE_CODE, 90),
        (MACHINE_CODE, 100),
    ]
    assert kept in data
    for gone in (b"old!", b"text", b"flash", b"new!"):
        assert gone not in data
    assert data.endswith(b"end")
    assert b"between" in data


def test_flash_attention_is_cut_to_the_heads_that_are_measured() -> None:
    wanted = (b"flash_fwd_hdim128_bf16_paged_sm90", b"flash_fwd_hdim128_e4m3_sm90", b"flash_fwd_combine", b"silu")
    assert all(map(is_for_head_size_128, wanted))
    unwanted = (b"flash_fwd_hdim64_bf16_sm90", b"flash_fwd_hdim128_fp16_sm90", b"flash_fwd_hdim64_512_bf16_sm90")
    assert not any(map(is_for_head_size_128, unwanted))
