"""The names of full KV blocks, under which replicas share and announce them.

A block's name is the sha256 of tagged, length-prefixed fields: the name of the block before it, the scope, and its
token ids. So equal names mean equal prefixes, and no choice of tokens or salt makes one scope reach another's blocks.
"""

import hashlib
import struct
from collections.abc import Sequence


def field(content: bytes) -> bytes:
    """`content` with its length before it."""
    return struct.pack("<I", len(content)) + content


_TAG = field(b"octavo.kv-block.v1")


def scope_of(cache_salt: str) -> bytes:
    """The scope of requests with this salt: they share blocks with each other and with nobody else."""
    return field(b"salt") + field(cache_salt.encode())


class BlockNamer:
    """Names blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tokens = struct.Struct(f"<I{block_size}I")

    def name(self, parent: bytes, scope: bytes, token_ids: Sequence[int]) -> bytes:
        """Of the block that holds `token_ids` (block_size of them) behind the block named `parent` (the first: b"")."""
        tokens = self._tokens.pack(4 * self.block_size, *token_ids)
        return hashlib.sha256(_TAG + field(parent) + scope + tokens).digest()


def block_names(token_ids: Sequence[int], block_size: int, scope: bytes) -> list[bytes]:
    """The names of all full blocks of a prompt, in order."""
    namer, names, parent = BlockNamer(block_size), [], b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = namer.name(parent, scope, token_ids[start : start + block_size])
        names.append(parent)
    return names
