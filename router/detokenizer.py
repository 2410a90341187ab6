"""From token ids to text, one token at a time, never with half a character.

Decoding byte by byte rather than re-decoding a window of tokens makes every token cost the same, whatever came before,
and makes the text of a prefix of tokens a prefix of the text: what was sent never has to be taken back.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenTable(Protocol):
    """What a detokenizer must know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the id names no token."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    Bytes that begin a character are held back until it is whole. U+FFFD stands for bytes that can no longer become one.
    """

    __slots__ = ("_decode", "_skipped", "_table")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that became certain with it."""
        if token_id in self._skipped:
            return ""
        return self._decode(self._table.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if a character remained incomplete, else nothing."""
        return self._decode(b"", True)


def detokenize(table: TokenTable, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole sequence of tokens."""
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
