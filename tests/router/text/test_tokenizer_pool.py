"""Text that waits for the tokenizer: bounded, shared between callers, dropped when its caller has gone."""

import asyncio
import sys
import threading
from typing import cast

import pytest

from router.errors import RouterFull
from router.security.identity import Identity, set_caller, set_connection
from router.text.tokenizer import Tokenizer
from router.text.tokenizer_pool import TokenizerPool


class SlowTokenizer:
    """Encodes only after `may_go_on` is set."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.encoded: list[str] = []

    def encode(self, text: str, most_tokens: int, *, add_special_tokens: bool) -> list[int]:
        self.begun.set()
        assert self.may_go_on.wait(20)
        self.encoded.append(text)
        return [len(text)]


def pool_of(tokenizer: SlowTokenizer, max_bytes: int) -> TokenizerPool:
    return TokenizerPool(cast(Tokenizer, tokenizer), max_bytes)


def encoding(pool: TokenizerPool, text: str, caller: str = "") -> asyncio.Task[list[int]]:
    """A call on the caller's connection."""

    async def call() -> list[int]:
        set_connection(caller)
        return await pool.encode(text, 2**20)

    return asyncio.create_task(call())


async def test_text_beyond_the_bound_is_refused_before_it_is_tokenized():
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 196_000)
    waiting = [encoding(pool, "x" * 30_000) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RouterFull, match="max_tokenizing_bytes=196000"):
        await encoding(pool, "y" * 30_000)
    # Non-ASCII characters may take four bytes.
    with pytest.raises(RouterFull):
        await encoding(pool, "é" * 1000)
    tokenizer.may_go_on.set()
    assert await asyncio.gather(*waiting) == [[30_000]] * 3
    # There is room again, also for one that is too long, for it is alone.
    assert await encoding(pool, "z" * 300_000) == [300_000]
    assert not [text for text in tokenizer.encoded if text[0] in "yé"]
    pool.close()


async def test_one_caller_leaves_room_for_the_next_ones():
    """One call of 64 MiB filled max_tokenizing_bytes for everybody before."""
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 120_000)
    # As long as it can be, and as many as are taken.
    greedy = [encoding(pool, "x" * 1_000_000, "greedy"), *(encoding(pool, "x" * 20_000, "greedy") for _ in range(8))]
    await asyncio.sleep(0)
    others = [encoding(pool, "y" * 8_000, f"other {number}") for number in range(3)]
    await asyncio.sleep(0)
    tokenizer.may_go_on.set()
    assert await asyncio.gather(*others) == [[8_000]] * 3
    results = await asyncio.gather(*greedy, return_exceptions=True)
    assert results[0] == [1_000_000]
    assert all(isinstance(result, RouterFull) for result in results[1:])
    pool.close()


async def test_a_tenant_is_one_caller_on_any_number_of_connections():
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 100_000)
    set_caller(Identity(tenant="a"))
    waiting = [encoding(pool, "x" * 20_000, "one"), encoding(pool, "x" * 20_000, "two")]
    await asyncio.sleep(0)
    with pytest.raises(RouterFull, match=r"\d+ of them from this caller"):
        await encoding(pool, "x" * 20_000, "three")
    tokenizer.may_go_on.set()
    await asyncio.gather(*waiting)
    pool.close()


async def test_long_texts_leave_a_thread_for_short_ones():
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 100_000_000)

    def encode(text: str, most_tokens: int, *, add_special_tokens: bool) -> list[int]:
        assert len(text) < 1_000 or tokenizer.may_go_on.wait(20)
        return [len(text)]

    tokenizer.encode = encode  # type: ignore[method-assign]
    # More than there are threads.
    long = [encoding(pool, "x" * 100_000, f"caller {number}") for number in range(8)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(encoding(pool, "short"), 10) == [5]
    tokenizer.may_go_on.set()
    assert await asyncio.gather(*long) == [[100_000]] * 8
    pool.close()


async def test_what_nobody_waits_for_any_more_is_not_tokenized():
    """For example, a client goes away or its deadline passes while its prompt waits for a thread."""
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 200_000)
    # More than there are threads.
    waiting = [encoding(pool, f"a{i}") for i in range(8)]
    gone = encoding(pool, "b" * 80_000)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    more = encoding(pool, "c" * 70_000)
    await asyncio.sleep(0)
    tokenizer.may_go_on.set()
    await asyncio.gather(*waiting, more)
    assert sorted(text[0] for text in tokenizer.encoded) == ["a"] * 8 + ["c"]
    pool.close()


async def test_what_runs_holds_its_place_though_nobody_waits_for_it():
    """Else a client that calls and leaves again and again would fill the threads."""
    tokenizer = SlowTokenizer()
    pool = pool_of(tokenizer, 100_000)
    running = encoding(pool, "a" * 40_000)
    assert await asyncio.to_thread(tokenizer.begun.wait, 20)
    running.cancel()
    await asyncio.wait({running})
    with pytest.raises(RouterFull):
        await encoding(pool, "b" * 40_000)
    tokenizer.may_go_on.set()
    async with asyncio.timeout(10):
        while pool.num_bytes:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
    assert await encoding(pool, "b" * 40_000) == [40_000]
    pool.close()


async def test_threads_switch_quickly_while_a_long_call_runs():
    """A short interval at all times would make each token of a stream cost more."""
    usual, tokenizer = sys.getswitchinterval(), SlowTokenizer()
    pool = pool_of(tokenizer, 2**20)
    brief = encoding(pool, "x" * 1000)
    await asyncio.to_thread(tokenizer.begun.wait, 20)
    assert sys.getswitchinterval() == usual
    long = [encoding(pool, "x" * 30_000), encoding(pool, "x" * 40_000)]
    await asyncio.sleep(0)
    assert sys.getswitchinterval() < usual
    tokenizer.may_go_on.set()
    await asyncio.gather(brief, *long)
    assert sys.getswitchinterval() == usual
    pool.close()
