"""Logging of a process: text for people, or one JSON object per line for collectors.

Code logs with the standard library (`logging.getLogger("octavo.router")`); fields given as `extra={"request_id": ...}`
appear in both forms. The forms are structlog's. structlog itself is not used: it imports rich and pygments, 0.1 s of
CPU in each process of a starting cluster, and its use takes more lines than this file.

Logging never blocks: runtime/telemetry/log_writer.py writes the lines.
"""

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

from runtime.process import seconds_alive
from runtime.telemetry.log_writer import LogWriter

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
_STDERR = 2
# Some 20,000 lines, minutes of a busy process.
_MAX_QUEUED_BYTES = 4 * 2**20
# The longest that a process which ends waits for its last lines to be read.
_LAST_WORDS_S = 2.0

_log = logging.getLogger("octavo.log")


def configure_logging(process: str, level: str, log_format: str) -> None:
    """Sends all logging of this process to stderr, and the exceptions that end it or one of its threads.

    process: its name in every line, such as "scheduler-0". level: debug, info, warning or error.
    log_format: text or json.
    """
    root = logging.getLogger()
    root.handlers[:] = [_Handler((_JsonLines if log_format == "json" else _Text)(process))]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # Their defaults write to stderr themselves.
    sys.excepthook, sys.unraisablehook = _log_exception, _log_unraisable
    threading.excepthook = _log_exception_of_thread
    ours = logging.getLogger("octavo")
    ours.setLevel(level.upper())
    # At this point, all that the main module needs has been imported.
    ours.debug("imported, %.2f s after the process began", seconds_alive())


def flush_logs() -> bool:
    """Waits until all that was logged is written, at most 2 s: for those who end the process at once (os._exit).
    True if it is written."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, _Handler)]
    return all(each.writer.flush(_LAST_WORDS_S) for each in handlers)


def num_dropped_records() -> int:
    """Records that nothing has read and that did not fit the queue any more."""
    return sum(each.writer.num_dropped for each in logging.getLogger().handlers if isinstance(each, _Handler))


class _Handler(logging.Handler):
    """Formats records on the thread that logs, because their arguments may change, and queues them to be written."""

    def __init__(self, formatter: "_Formatter") -> None:
        super().__init__()
        self.setFormatter(formatter)
        words = "%d log records were dropped here, because nothing read the log"
        self.writer = LogWriter(_STDERR, _MAX_QUEUED_BYTES, lambda number: self._line(_record(words, number)))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(self._line(record))
        except Exception:  # noqa: BLE001 (a record that can't be formatted fails no request)
            words = "a log record of %s line %d could not be formatted"
            self.writer.put(self._line(_record(words, record.pathname, record.lineno, exc_info=sys.exc_info())))

    def _line(self, record: logging.LogRecord) -> str:
        return self.format(record) + "\n"

    def flush(self) -> None:
        """Waits until all is written, at most 2 s. `logging` calls it when the process ends."""
        self.writer.flush(_LAST_WORDS_S)


def _record(words: str, *arguments: object, exc_info: Any = None) -> logging.LogRecord:
    """A warning about the log itself."""
    return _log.makeRecord(_log.name, logging.WARNING, __file__, 0, words, arguments, exc_info)


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        _log.critical("this process ends by an exception", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)


def _log_exception_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and ended.exc_type is not SystemExit:
        exception = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        name = ended.thread.name if ended.thread else "?"
        _log.critical("thread %s has ended by an exception", name, exc_info=exception)


def _log_unraisable(raised: Any) -> None:
    exception = (raised.exc_type, raised.exc_value, raised.exc_traceback)
    _log.error("%s: %r", raised.err_msg or "an exception was ignored in", raised.object, exc_info=exception)


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
        # Indented and escaped: exceptions quote foreign text.
        return "\n".join([line, *(f"  {_one_line(each)}" for each in self.traceback(record).split("\n") if each)])


class _JsonLines(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"event": record.getMessage(), "level": record.levelname.lower(), **self.fields(record)}
        entry["timestamp"] = self.time(record)
        if traceback := self.traceback(record):
            entry["exception"] = traceback
        return json.dumps(entry, default=repr)


def _shown(value: object) -> str:
    """A field's value for a line of text, in quotes only if its end would be unclear without them."""
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(" =\"'"):
        return value
    return repr(value)


def _one_line(text: str) -> str:
    """Escapes unprintable characters, so that foreign text, such as ids and causes, can neither begin a line that looks
    like ours nor control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
