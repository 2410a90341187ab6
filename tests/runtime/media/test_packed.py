"""Packed items: their bytes and names are those of the message, which is never built."""

import pytest

from protos import inference_pb2 as pb
from runtime.media.names import item_name, serialized
from runtime.media.packed import PackedItem

CASES = [
    (pb.ITEM_KIND_IMAGE, [b"x" * 300], 0.0, pb.ItemOptions()),
    (pb.ITEM_KIND_IMAGE, [b"x" * 127], 0.0, pb.ItemOptions(max_pixels=5)),
    (pb.ITEM_KIND_IMAGE, [bytes(3 * 2**20)], 0.0, pb.ItemOptions(min_pixels=1, max_pixels=2**31)),
    (pb.ITEM_KIND_VIDEO, [b"a", b"", b"b" * 20_000], 2.5, pb.ItemOptions()),
]


@pytest.mark.parametrize(("kind", "files", "rate", "options"), CASES)
def test_they_are_the_serialized_message(
    kind: pb.ItemKind, files: list[bytes], rate: float, options: pb.ItemOptions
) -> None:
    data = pb.ItemData(kind=kind, files=files, frames_per_second=rate, options=options)
    packed = PackedItem(kind, files, rate, options)
    assert b"".join(packed.pieces) == serialized(data)
    assert packed.name == item_name(serialized(data))
    assert packed.num_bytes == len(serialized(data))
    assert packed.data() == data
    for size in (7, 1000, 2**20):
        parts = list(packed.parts(size)) if size > 7 or packed.num_bytes < 2**20 else []
        assert not parts or b"".join(parts) == serialized(data)
        assert all(len(part) == size for part in parts[:-1])


def test_equal_settings_give_equal_names() -> None:
    one, other = (PackedItem(pb.ITEM_KIND_IMAGE, [b"x"], 0.0, pb.ItemOptions(max_pixels=n)) for n in (4, 5))
    again = PackedItem(pb.ITEM_KIND_IMAGE, [b"x"], 0.0, pb.ItemOptions(max_pixels=4))
    assert one.name == again.name != other.name
