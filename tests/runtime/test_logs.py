"""runtime.telemetry.logs: a log collector gets one JSON object per line, with the request's id."""

import json
import subprocess
import sys

SCRIPT = """
import logging
from runtime.telemetry.logs import configure_logging
configure_logging("router", "info", {form!r})
logger = logging.getLogger("octavo.router")
logger.info("finished %s", "well", extra={{"request_id": "r-1"}})
logger.debug("unseen")
try:
    raise KeyError("lost")
except KeyError:
    logger.exception("went wrong")
"""


def run(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(form=form)], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_json_is_an_object_a_line():
    first, second = (json.loads(line) for line in run("json"))
    assert (first["event"], first["process"], first["request_id"], first["level"]) == (
        "finished well",
        "router",
        "r-1",
        "info",
    )
    assert "KeyError: 'lost'" in second["exception"]


def test_text_shows_the_same_fields():
    lines = run("text")
    assert "finished well" in lines[0]
    assert "request_id=r-1" in lines[0]
    assert not any("unseen" in line for line in lines)


QUOTES = """
import logging
from runtime.telemetry.logs import configure_logging
configure_logging("router", "info", {form!r})
logger = logging.getLogger("octavo.router")
forged = "2026-11-23T00:00:00.000000Z [info     ] all is well"
foreign = "no such field" + chr(10) + forged + chr(27) + "[2J" + chr(13) + chr(0x2028)
try:
    error = ValueError(foreign)
    error.add_note(foreign)
    raise error
except ValueError:
    logger.exception("failed: %s", foreign)
try:
    raise ExceptionGroup(foreign, [KeyError(foreign), ValueError(foreign)])
except ExceptionGroup:
    logger.exception("failed")
logger.warning("%d", "not a number")
"""


def test_foreign_text_in_an_exception_forges_no_line():
    """Before: each of these exceptions began lines of its own, and its escape sequences reached the terminal."""
    done = subprocess.run([sys.executable, "-c", QUOTES.format(form="text")], capture_output=True, check=True)
    lines = done.stderr.decode().split("\n")
    ours = [line for line in lines if line and not line.startswith("  ")]
    assert len(ours) == 3
    assert all("process=router" in line and line[28:].startswith("[") for line in ours)
    assert all(line.isprintable() for line in lines)
    assert sum("all is well" in line for line in lines) == 6
    assert "could not be formatted" in ours[2]
