"""Runs a tokenizer's slow calls on threads, so that a long prompt does not hold up other streams, nor one caller
another.

Callers share the bytes of text that may wait (runtime.shares). Threads serve them in turn, and long texts never take
all threads.
"""

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos.inference_pb2 import ChatPrompt
from router.errors import RouterFull
from router.security.identity import caller_share
from router.text.tokenizer import Tokenizer
from router.turns import Turns
from runtime.shares import SharedRoom

# Bytes of a call besides its text.
_CALL_BYTES = 2048
# Longer texts leave one thread free for shorter ones: a MB takes 0.4 s.
_LONG_BYTES = 65_536
# Shorter calls end within milliseconds.
_BRIEF_BYTES = 16_384
# The longest that the event loop waits for the interpreter lock while other threads compute; Python's default is 5 ms.
_SWITCH_S = 0.0005
# Token ids of a message that become a list before other work of the event loop has its turn: 3 ms.
_IDS_AT_ONCE = 65_536

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


async def listed(token_ids: Sequence[int]) -> list[int]:
    """Returns the token ids of a message as a list. Of a million that takes 40 ms, in which other streams go on."""
    ids = list(token_ids[:_IDS_AT_ONCE])
    for start in range(_IDS_AT_ONCE, len(token_ids), _IDS_AT_ONCE):
        await asyncio.sleep(0)
        ids += token_ids[start : start + _IDS_AT_ONCE]
    return ids


class QuickSwitches:
    """Lets the event loop have the interpreter lock sooner while calls that are not brief run.

    Gaps between tokens beside clients that detokenize 1,048,576 tokens without pause: p99 71 ms instead of 122. At all
    times it would take the lock from the loop itself, for gRPC's threads: a token would cost 1.5 times as much.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._usual_s = sys.getswitchinterval()

    def begin(self) -> None:
        if not self._num_calls:
            sys.setswitchinterval(_SWITCH_S)
        self._num_calls += 1

    def end(self) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            sys.setswitchinterval(self._usual_s)


# The process has one interval.
QUICK_SWITCHES = QuickSwitches()


class TokenizerPool:
    """The calls of all requests of a router process. They raise RouterFull if too much text waits. A call is skipped
    if its caller goes away, or its deadline passes, while it waits."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        """max_bytes: option max_tokenizing_bytes."""
        self.tokenizer = tokenizer
        self._bytes = SharedRoom(max_bytes)
        num_threads = max(2, min(4, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._turns, self._long_turns = Turns(num_threads), Turns(num_threads - 1)
        self._switches = QUICK_SWITCHES

    @property
    def num_bytes(self) -> int:
        """The bytes that wait or are being tokenized."""
        return self._bytes.total

    async def encode(self, text: str, most_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        """Raises TooManyTokensError, too."""
        # A text of ASCII takes a byte a character, any other up to four.
        size = len(text) * (1 if text.isascii() else 4)
        encode = functools.partial(
            self.tokenizer.encode, most_tokens=most_tokens, add_special_tokens=add_special_tokens
        )
        return await self._run(encode, text, size)

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[list[int]]]:
        return await self._run(self.tokenizer.encode_bad_words, list(words), 4 * sum(map(len, words)))

    async def encode_fill_in(
        self, prefix: str, suffix: str, most_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Raises TooManyTokensError, too."""
        encode = functools.partial(
            self.tokenizer.encode_fill_in,
            prefix,
            most_tokens=most_tokens,
            add_special_tokens=add_special_tokens,
        )
        return await self._run(encode, suffix, 4 * (len(prefix) + len(suffix)))

    async def encode_chat(self, chat: ChatPrompt, most_tokens: int, *, add_special_tokens: bool = False) -> list[int]:
        """Raises TemplateError and TooManyTokensError, too."""
        encode = functools.partial(
            self.tokenizer.encode_chat, most_tokens=most_tokens, add_special_tokens=add_special_tokens
        )
        return await self._run(encode, chat, chat.ByteSize())

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._run(
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
            await listed(token_ids),
            8 * len(token_ids),
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[_Argument], _Result], argument: _Argument, size: int) -> _Result:
        caller = caller_share()
        # One text alone may be longer than a caller's share.
        max_bytes = self._bytes.size
        size = min(size + _CALL_BYTES, max_bytes // 2)
        if not self._bytes.take(caller, size):
            raise RouterFull(
                f"{self._bytes.total} bytes of text wait for the tokenizer, {self._bytes.of(caller)} of them from this "
                f"caller, and this text has {size}: a caller may have as many as are free of "
                f"max_tokenizing_bytes={max_bytes}; try again later or at another router"
            )
        with contextlib.ExitStack() as held:
            held.callback(self._bytes.give_back, caller, size)
            for turns in (self._long_turns, self._turns) if size > _LONG_BYTES else (self._turns,):
                await turns.take(caller)
                held.callback(turns.give_back)
            if size > _BRIEF_BYTES:
                self._switches.begin()
                held.callback(self._switches.end)
            work = self._threads.submit(function, argument)
            # A call that has begun can't be stopped: it holds its turn until it ends, even if its caller goes away.
            loop, until_done = asyncio.get_running_loop(), held.pop_all()
            work.add_done_callback(lambda _: _call_soon(loop, until_done.close))
        return await asyncio.wrap_future(work)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # The loop may be closed by the time that the last calls of a router end.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
