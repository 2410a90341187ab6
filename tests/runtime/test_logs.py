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
