"""Takes code for other GPUs out of a shared object, so that it compresses well: zeroes the payloads of fatbin entries.

Headers stay, so that the CUDA runtime still finds the entries; it reads the payload of the one that fits its GPU, when
a kernel of it is first launched. Layout: a fatbin begins with a magic number, version 1, the header's bytes (16) and
the bytes of its entries; an entry has its kind (1: PTX, 2: machine code), its header's bytes at 4, the payload's bytes
at 8, and the architecture at 28.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX = 1
# FlashAttention's cubins name the source file that they come from: flash_fwd_hdim128_bf16_paged_sm90.cu.
_FLASH = re.compile(rb"hdim(\w+?)_(bf16|fp16|e4m3)_")


@dataclass(frozen=True, slots=True)
class Entry:
    kind: int
    arch: int
    # The payload's bytes in the file.
    start: int
    end: int


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """The entries of all fatbins in a shared object."""
    place = data.find(_MAGIC)
    while place >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, place + 4)
        end = place + header + size
        if (version, header) != (1, 16) or end > len(data):
            # Four bytes that only look like it.
            place = data.find(_MAGIC, place + 4)
            continue
        start = place + header
        while start < end:
            kind, _, entry_header = struct.unpack_from("<HHI", data, start)
            (payload,) = struct.unpack_from("<Q", data, start + 8)
            (arch,) = struct.unpack_from("<I", data, start + 28)
            if entry_header < 48 or start + entry_header + payload > end + 64:
                break
            yield Entry(kind, arch, start + entry_header, start + entry_header + payload)
            start += entry_header + payload
        place = data.find(_MAGIC, end)


def prune(data: bytearray, arch: int, wanted: Callable[[bytes], bool] = lambda payload: True) -> Counter[str]:
    """Zeroes, in place, the payloads of PTX, of other architectures, and of machine code that is not `wanted`. Returns
    the bytes of each kind: kept, and by what they were zeroed for."""
    sizes: Counter[str] = Counter()
    for entry in list(entries(data)):
        payload = bytes(data[entry.start : entry.end])
        why = "PTX" if entry.kind == _PTX else f"sm_{entry.arch}" if entry.arch != arch else "kept"
        if why == "kept" and not wanted(payload):
            why = "not wanted"
        sizes[why] += len(payload)
        if why != "kept":
            data[entry.start : entry.end] = bytes(len(payload))
    return sizes


def is_for_head_size_128(payload: bytes) -> bool:
    """True unless it is FlashAttention for another head size than 128, or for float16."""
    found = _FLASH.search(payload)
    return found is None or (found[1] == b"128" and found[2] != b"fp16")
