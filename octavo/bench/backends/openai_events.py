"""The events of an OpenAI stream, and the tokens in them.

Events say how many tokens they hold by usage so far (stream_options.continuous_usage_stats) or by token ids. Servers
that send neither are taken to send equal pieces: the usage at the end is spread evenly over them.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from octavo.reports import RequestTrace


class CountedBy(StrEnum):
    """The sources of the number of output tokens, the least exact one last."""

    TOKEN_IDS = "token_ids"
    USAGE = "usage"
    # The server sent no usage.
    EVENTS = "events"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Lines:
    """Cuts the bytes of server-sent events into the data of each. These servers write one line of data an event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Output:
    """Folds the events of one request into its trace."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        # For each event with a choice: when it came, whether it has text, its token ids, and the tokens so far.
        self._events: list[tuple[float, bool, int, int | None]] = []
        self._total: int | None = None
        self._finish_reason: str | None = None
        self.num_prompt_tokens = 0
        self.counted_by = CountedBy.EVENTS

    def take(self, data: bytes, now: float) -> None:
        """data: of one event. now: when it came."""
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            self._fail(f"an event is not what OpenAI's API sends ({error}): {_shown(data)}")
            return
        if event.error is not None:
            self._fail(f"an event tells of an error: {_shown(data)}")
            return
        if event.usage is not None:
            self.num_prompt_tokens, self._total = event.usage.prompt_tokens, event.usage.completion_tokens
        if not event.choices:
            return
        has_text = any(choice.has_text for choice in event.choices)
        num_ids = sum(len(choice.token_ids or ()) for choice in event.choices)
        self._events.append((now, has_text, num_ids, event.usage and event.usage.completion_tokens))
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason

    def end(self, output_len: int, *, is_exact: bool) -> None:
        """Fills the trace. is_exact: exactly output_len tokens were asked for, not that many at most."""
        trace = self._trace
        for now, count in self._counted():
            if count > 0:
                trace.token_times.append(now)
                trace.token_counts.append(count)
        if self._finish_reason is None:
            self._fail("the stream ended without a finish_reason")
        elif not trace.num_tokens:
            self._fail("no output token came")
        elif is_exact and trace.num_tokens != output_len and self.counted_by is not CountedBy.EVENTS:
            self._fail(f"{trace.num_tokens} output tokens came, not {output_len}")

    def _counted(self) -> list[tuple[float, int]]:
        """Returns when tokens came, and how many."""
        if any(num_ids for _, _, num_ids, _ in self._events):
            self.counted_by = CountedBy.TOKEN_IDS
            return [(now, num_ids) for now, _, num_ids, _ in self._events]
        with_text = [(now, so_far) for now, has_text, _, so_far in self._events if has_text]
        if self._total is None:
            return [(now, 1) for now, _ in with_text]
        self.counted_by = CountedBy.USAGE
        if all(so_far is not None for _, so_far in with_text):
            # An event may have tokens and no text: the first bytes of a character.
            totals = [(now, so_far) for now, _, _, so_far in self._events if so_far is not None]
            before = (0, *(so_far for _, so_far in totals))
            return [(now, so_far - earlier) for (now, so_far), earlier in zip(totals, before, strict=False)]
        counts = _spread(self._total, len(with_text))
        return [(now, count) for (now, _), count in zip(with_text, counts, strict=True)]

    def _fail(self, why: str) -> None:
        self._trace.error = self._trace.error or why


def _spread(total: int, num_events: int) -> list[int]:
    """Spreads tokens over events: [1, 2, 1, 2] for 6 in 4."""
    return [total * (index + 1) // num_events - total * index // num_events for index in range(num_events)]


def _shown(data: bytes) -> str:
    return data.decode(errors="replace")[:500]
