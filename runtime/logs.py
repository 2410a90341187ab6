"""Logging of a process: text for people or one JSON object a line for collectors, both through structlog.

Code logs with the standard library (`logging.getLogger("octavo.router")`); fields given as `extra={"request_id": ...}`
appear in both forms.
"""

import logging
import sys

import structlog


def configure_logging(process: str, level: str, log_format: str) -> None:
    """Sends all logging of this process to stderr.

    process: its name in every line, such as "scheduler-0". level: debug, info, warning or error.
    log_format: text or json.
    """

    def add_process(_logger: object, _method: str, event: dict) -> dict:
        event["process"] = process
        return event

    shared = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
    ]
    if log_format == "json":
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("octavo").setLevel(level.upper())
