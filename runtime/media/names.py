"""Names of items: equal names mean equal embeddings, whatever process computes them."""

import hashlib

from protos import inference_pb2 as pb

NAME_BYTES = 32
TAG = b"octavo.item.v1\x00"


def serialized(data: pb.ItemData) -> bytes:
    """Returns the bytes that travel between processes and that `item_name` takes."""
    return data.SerializeToString(deterministic=True)


def item_name(data: bytes) -> bytes:
    """Returns the name of an item: 32 bytes. data: a serialized ItemData."""
    return hashlib.sha256(TAG + data).digest()
