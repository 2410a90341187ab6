"""Computes a file of requests by a server's HTTP API, for `octavo run-batch`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2

from router.batches.journal import Journal, JournalError, counts_of
from router.batches.lines import LineReader, summary_of
from router.batches.run import BatchRun, Later, PassEnd
from router.batches.sending import Sender, SendingError

# The router's own limit, max_message_bytes, may be lower: it then refuses the line.
_MOST_LINE_BYTES = 2**30
_CONNECT_S = 10.0


class BatchError(Exception):
    """The batch can't begin or go on; the message says why, and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """concurrency: requests at once. retry_for: seconds until a request without an answer ends the job. timeout:
    seconds for one answer."""

    input: Path
    output: Path
    concurrency: int = 64
    retry_for: float = 600.0
    timeout: float = 3600.0

    @property
    def journal(self) -> Path:
        """Holds the output until it is complete."""
        return self.output.with_name(f"{self.output.name}.part")


@dataclass(frozen=True, slots=True)
class Outcome:
    num_lines: int
    num_successes: int
    # Lines that an earlier run had computed.
    num_kept: int

    def __str__(self) -> str:
        kept = f", {self.num_kept} of them kept from before" if self.num_kept else ""
        return (
            f"{self.num_lines} lines: {self.num_successes} answers, {self.num_lines - self.num_successes} errors{kept}"
        )


# Called with the number of lines in all, and how many are done so far.
OnProgress = Callable[[int, int], None]


async def compute(job: Job, url: str, api_key: str, on_progress: OnProgress = lambda total, done: None) -> Outcome:
    """Computes the lines that the journal does not have, then gives it the output's name.

    url: of a server. api_key: empty: none. Raises BatchError; the same call goes on later.
    """
    try:
        summary = await asyncio.to_thread(summary_of, job.input)
    except OSError as error:
        raise BatchError(f"--input={str(job.input)!r}: {error.strerror or error}") from None
    try:
        if job.output.exists() and job.output.stat().st_size:
            return await asyncio.to_thread(_complete, job, summary.digest, summary.num_lines)
        journal = Journal(job.journal, summary.digest)
    except (JournalError, OSError) as error:
        raise BatchError(f"--output: {error}") from None
    try:
        num_kept = journal.num_lines
        on_progress(summary.num_lines, num_kept)
        async with _client(job, url, api_key) as client:
            send, later, end = Sender(client, patience=job.retry_for).send, Later(), PassEnd.LINES_LEFT
            while end is not PassEnd.ALL_DONE:
                num_before = journal.num_lines
                with LineReader(job.input, _MOST_LINE_BYTES) as reader:
                    run = BatchRun(
                        summary.digest,
                        reader,
                        journal,
                        journal,
                        send,
                        concurrency=job.concurrency,
                        later=later,
                        on_line=lambda _: on_progress(summary.num_lines, journal.num_lines),
                    )
                    end = await run.run()
                if end is PassEnd.LINES_LEFT and journal.num_lines == num_before:
                    raise SendingError(later.reason)
        journal.publish(job.output)
        return Outcome(journal.num_lines, journal.num_successes, num_kept)
    except (SendingError, JournalError, OSError) as error:
        raise BatchError(
            f"{error}; {journal.num_lines} of {summary.num_lines} lines are kept in {str(job.journal)!r}: the same "
            "command goes on from there"
        ) from None
    finally:
        await journal.close()


def _complete(job: Job, key: str, num_lines: int) -> Outcome:
    """Returns the outcome of an earlier run. Raises JournalError."""
    num_there, num_successes = counts_of(job.output, key)
    if num_there != num_lines:
        raise JournalError(
            f"{str(job.output)!r} has {num_there} of {num_lines} lines: remove it, or name another output"
        )
    return Outcome(num_there, num_successes, num_there)


def _client(job: Job, url: str, api_key: str) -> httpx2.AsyncClient:
    """Raises BatchError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        base = httpx2.URL(url.rstrip("/").removesuffix("/v1"))
        if base.scheme not in ("http", "https") or not base.host:
            raise httpx2.InvalidURL("use http://HOST:PORT or https://HOST:PORT")
    except httpx2.InvalidURL as error:
        raise BatchError(f"--url={url!r}: {error}") from None
    return httpx2.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=httpx2.Timeout(job.timeout, connect=_CONNECT_S),
        limits=httpx2.Limits(max_connections=job.concurrency, max_keepalive_connections=job.concurrency),
    )
