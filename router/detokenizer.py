"""From token ids to text, one token at a time, never with half a character.

Decoding byte by byte rather than re-decoding a window of tokens makes every token cost the same, whatever came before,
and makes the text of a prefix of tokens a prefix of the text: what was sent never has to be taken back.
"""

from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import Protocol


class TokenTable(Protocol):
    """What a detokenizer must know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the id names no token."""
        ...

    def token_text(self, token_id: int) -> str | None:
        """The same as text; None if they are not whole characters."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    Bytes that begin a character are held back until it is whole. U+FFFD stands for bytes that can no longer become one.
    """

    __slots__ = ("_decoder", "_skipped", "_table")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that became certain with it."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._table.token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same for several."""
        # Between two characters, as nearly always, most tokens' texts are known and need not be decoded.
        if not self._decoder.buffer and self._skipped.isdisjoint(token_ids):
            texts = [self._table.token_text(token_id) for token_id in token_ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type] # just seen
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if a character remained incomplete, else nothing."""
        return self._decoder.decode(b"", True)


def detokenize(table: TokenTable, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole sequence of tokens."""
    detokenizer = IncrementalDetokenizer(table, skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
