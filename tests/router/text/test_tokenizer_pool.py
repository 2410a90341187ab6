"""What waits for the tokenizer: bounded, and dropped if nobody waits for it any more."""

import asyncio
import threading
from typing import cast

import pytest

from router.errors import RouterFull
from router.text.tokenizer import Tokenizer, TokenizerPool


class SlowTokenizer:
    """Encodes when it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        assert self.may_go_on.wait(20)
        self.encoded.append(text)
        return [len(text)]


def pool_of(tokenizer: SlowTokenizer, max_bytes: int) -> TokenizerPool:
    return TokenizerPool(cast(Tokenizer, tokenizer), max_bytes)


async def test_text_beyond_the_bound_is_refused_before_it_is_tokenized():
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 100_000)
    waiting = [asyncio.create_task(pool.encode("x" * 30_000)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RouterFull, match="max_tokenizing_bytes=100000"):
        await pool.encode("y" * 30_000)
    # Other characters than ASCII may take four bytes.
    with pytest.raises(RouterFull):
        await pool.encode("é" * 1000)
    tokenizer.may_go_on.set()
    assert await asyncio.gather(*waiting) == [[30_000]] * 3
    # There is room again, also for one that is too long, for it is alone.
    assert await pool.encode("z" * 200_000) == [200_000]
    assert not [text for text in tokenizer.encoded if text[0] == "y"]
    pool.close()


async def test_what_nobody_waits_for_any_more_is_not_tokenized():
    """As when a client goes away, or its deadline passes, while its prompt waits for a thread."""
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 100_000)
    # More than there are threads.
    waiting = [asyncio.create_task(pool.encode(f"a{i}")) for i in range(8)]
    gone = asyncio.create_task(pool.encode("b" * 80_000))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    more = asyncio.create_task(pool.encode("c" * 70_000))
    await asyncio.sleep(0)
    tokenizer.may_go_on.set()
    await asyncio.gather(*waiting, more)
    assert sorted(text[0] for text in tokenizer.encoded) == ["a"] * 8 + ["c"]
    pool.close()
