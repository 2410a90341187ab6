"""Logging of a process: text for people, or one JSON object per line for collectors.

Code logs with the standard library (`logging.getLogger("octavo.router")`); fields given as `extra={"request_id": ...}`
appear in both forms. The forms are structlog's. structlog itself is not used: it imports rich and pygments, 0.1 s of
CPU in each process of a starting cluster, and its use takes more lines than this file.
"""

import json
import logging
import sys
import time

from runtime.process import seconds_alive

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def configure_logging(process: str, level: str, log_format: str) -> None:
    """Sends all logging of this process to stderr.

    process: its name in every line, such as "scheduler-0". level: debug, info, warning or error.
    log_format: text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_JsonLines if log_format == "json" else _Text)(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    ours = logging.getLogger("octavo")
    ours.setLevel(level.upper())
    # At this point, all that the main module needs has been imported.
    ours.debug("imported, %.2f s after the process began", seconds_alive())


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """The fields given as `extra`, and the process."""
        extra: dict[str, object] = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        return extra | {"process": self._process}

    def time(self, record: logging.LogRecord) -> str:
        """ISO 8601 in UTC, to the microsecond."""
        seconds, micros = divmod(round(record.created * 1e6), 1_000_000)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{micros:06}Z"

    def traceback(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_shown(value)}" for name, value in sorted(self.fields(record).items()))
        line = f"{self.time(record)} [{record.levelname.lower():<9}] {_one_line(record.getMessage())} {fields}"
        return "\n".join(filter(None, (line, self.traceback(record))))


class _JsonLines(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {"event": record.getMessage(), "level": record.levelname.lower(), **self.fields(record)}
        said["timestamp"] = self.time(record)
        if traceback := self.traceback(record):
            said["exception"] = traceback
        return json.dumps(said, default=repr)


def _shown(value: object) -> str:
    """A field's value for a line of text, in quotes only if its end would be unclear without them."""
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(" =\"'"):
        return value
    return repr(value)


def _one_line(text: str) -> str:
    """Escapes unprintable characters, so that foreign text, such as ids and causes, can neither begin a line that looks
    like ours nor control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
