"""Sends a line's request until a server has answered it, or others should have their turn."""

import contextlib
import random
import time
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import NoReturn

import httpx2
import tenacity

# Answers after which the same request may succeed later. 409: it is live, sent before its sender crashed.
RETRIED = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
# Answers after which no other line would succeed, either.
FATAL = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
# A server's Retry-After counts up to here.
_MOST_S = 60.0


# Answers that say nothing about their request: the server is full, or not ready.
_BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class SendingError(Exception):
    """No line finds a server that answers it, so the batch stops; it can go on later."""


class PutOff(Exception):
    """A request has been tried for as long as one may at a time; others go first. answer: the last one, if it was one;
    None: there was none. is_its_own: it may come from the request itself, not from the server's state."""

    def __init__(self, message: str, answer: tuple[int, bytes] | None, *, is_its_own: bool) -> None:
        super().__init__(message)
        self.answer, self.is_its_own = answer, is_its_own


class Sender:
    def __init__(
        self,
        client: httpx2.AsyncClient,
        *,
        patience: float,
        fatal: Collection[int] = FATAL,
        gate: AbstractAsyncContextManager[object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """client: its base_url is the server's. patience: seconds for which a request is tried at a time. fatal:
        statuses after which the batch stops. gate: held while a request is under way, not between two tries."""
        self._client, self._patience, self._fatal, self._clock = client, patience, fatal, clock
        self._gate = contextlib.nullcontext() if gate is None else gate
        self._backoff = tenacity.wait_random_exponential(multiplier=0.2, max=5.0)

    async def send(self, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Returns the status and the body of the answer. Raises PutOff, SendingError."""
        began = self._clock()

        def must_stop(state: tenacity.RetryCallState) -> bool:
            return self._clock() - began + state.upcoming_sleep > self._patience

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(httpx2.TransportError)
            | tenacity.retry_if_result(lambda answer: answer.status_code in RETRIED),
            wait=self._wait,
            stop=must_stop,
            retry_error_callback=_give_up,
        )
        answer = await retrying(self._post, url, body, request_id)
        if answer.status_code in self._fatal:
            raise SendingError(f"{answer.status_code} for every line: {answer.text[:500]}")
        return answer.status_code, answer.content

    async def _post(self, url: str, body: bytes, request_id: str) -> httpx2.Response:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        async with self._gate:
            return await self._client.post(url, content=body, headers=headers)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        backoff = self._backoff(state)
        assert state.outcome is not None
        if state.outcome.failed:
            return backoff
        try:
            asked = float(state.outcome.result().headers.get("retry-after", "0"))
        except ValueError:
            # A date; servers of models send seconds.
            return backoff
        return max(backoff, min(asked, _MOST_S) * random.uniform(1.0, 1.25))


def _give_up(state: tenacity.RetryCallState) -> NoReturn:
    assert state.outcome is not None
    error = state.outcome.exception()
    if error is not None:
        answered, last = None, f"{type(error).__name__}: {error}"
    else:
        answer = state.outcome.result()
        answered, last = (answer.status_code, answer.content), f"status {answer.status_code}: {answer.text[:500]}"
    raise PutOff(
        f"no answer after {state.attempt_number} tries, {state.seconds_since_start or 0:.0f} s; the last: {last}",
        answered,
        is_its_own=answered is None or answered[0] not in _BUSY,
    )
