"""Hashes of full KV blocks, by which replicas share and announce them.

A block's hash is a sha256 over the previous block's hash and its own token ids. The first block follows the hash of its
scope, a sha256 over tagged, length-prefixed fields. So equal hashes mean equal prefixes, and no choice of tokens or
salt lets one scope reach another's blocks. A block in which items (images, videos) start is hashed with their places
and names, so blocks are shared only by prompts with the same items: tokens alone do not tell one image from another.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence

# A hash of 1 + 32 + 4 * 16 bytes and padding takes two of sha256's own blocks; a third one would cost a fifth more.
_BLOCK = b"\x01"
_BLOCK_WITH_ITEMS = b"\x02"


def hash_scope(kind: bytes, value: bytes) -> bytes:
    """The hash of a scope: 32 bytes."""
    fields = b"".join(struct.pack("<I", len(field)) + field for field in (b"octavo.kv-block.v2", kind, value))
    return hashlib.sha256(b"\x00" + fields).digest()


def scope_of(cache_salt: str) -> bytes:
    """The scope of requests with this salt: they share blocks only with each other."""
    return hash_scope(b"salt", cache_salt.encode())


def hash_block(parent: bytes, token_ids: bytes, items: bytes = b"") -> bytes:
    """The hash of a block. parent: the hash of the previous block, or of the scope for the first block.

    token_ids: int32, little-endian. items: those that start in the block, as `items_by_block` returns them.
    """
    if items:
        return hashlib.sha256(_BLOCK_WITH_ITEMS + parent + token_ids + items).digest()
    return hashlib.sha256(_BLOCK + parent + token_ids).digest()


def items_by_block(items: Iterable[tuple[int, bytes]], block_size: int) -> dict[int, bytes]:
    """The items that start in each block, in the form that `hash_block` takes, by the block's index.

    items: first token and name of each item of a prompt, in order.
    """
    found: dict[int, bytes] = {}
    for first_token, name in items:
        index, offset = divmod(first_token, block_size)
        found[index] = found.get(index, b"") + struct.pack("<I", offset) + name
    return found


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids in the form that `hash_block` takes."""
    return array("i", token_ids).tobytes()


def hash_prompt_blocks(
    token_ids: Sequence[int], block_size: int, scope: bytes, items: Iterable[tuple[int, bytes]] = ()
) -> list[bytes]:
    """The hashes of all full blocks of a prompt, in order. items: as in `items_by_block`."""
    ids, names, parent, width = token_bytes(token_ids), [], scope, 4 * block_size
    starting: Mapping[int, bytes] = items_by_block(items, block_size) if items else {}
    for index, start in enumerate(range(0, len(ids) - width + 1, width)):
        parent = hash_block(parent, ids[start : start + width], starting.get(index, b""))
        names.append(parent)
    return names
