"""An item's ItemData, serialized, but not copied: files of many MB stay where they are until they are sent."""

import hashlib
from collections.abc import Iterator, Sequence

from protos import inference_pb2 as pb
from runtime.media.names import TAG

_FILE = pb.ItemData.DESCRIPTOR.fields_by_name["files"].number << 3 | 2
# sha256 lets other threads run meanwhile from 2 KiB on; a piece takes 1 ms.
_HASHED_BYTES = 2**20


class PackedItem:
    """Joined, its pieces are what runtime.media.names.serialized returns; to join 20 MB takes 12 ms, and to serialize
    them 45 ms, in which no other thread runs."""

    __slots__ = ("kind", "name", "num_bytes", "pieces")

    def __init__(
        self, kind: pb.ItemKind, files: Sequence[bytes], frames_per_second: float, options: pb.ItemOptions
    ) -> None:
        """frames_per_second: of a video; 0 for an image. Takes 1 ms a MB: not for an event loop."""
        self.kind = kind
        begin = pb.ItemData(kind=kind).SerializeToString(deterministic=True)
        rest = pb.ItemData(frames_per_second=frames_per_second, options=options)
        pieces = [begin]
        for file in files:
            pieces += [bytes([_FILE]) + _varint(len(file)), file]
        pieces.append(rest.SerializeToString(deterministic=True))
        self.pieces: Sequence[bytes] = pieces
        self.num_bytes = sum(map(len, pieces))
        self.name = self._hashed()

    def parts(self, most_bytes: int) -> Iterator[bytes]:
        """Yields the bytes in order, in parts of most_bytes; the last one may be shorter."""
        held = bytearray()
        for piece in self.pieces:
            view = memoryview(piece)
            while view:
                room = most_bytes - len(held)
                held += view[:room]
                view = view[room:]
                if len(held) == most_bytes:
                    yield bytes(held)
                    held.clear()
        if held:
            yield bytes(held)

    def data(self) -> pb.ItemData:
        """Returns the message."""
        return pb.ItemData.FromString(b"".join(self.pieces))

    def _hashed(self) -> bytes:
        digest = hashlib.sha256(TAG)
        for piece in self.pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _HASHED_BYTES):
                digest.update(view[start : start + _HASHED_BYTES])
        return digest.digest()


def _varint(number: int) -> bytes:
    coded = bytearray()
    while number > 0x7F:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    coded.append(number)
    return bytes(coded)
