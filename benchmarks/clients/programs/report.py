"""Reports what a client's program tried: a line of JSON on stdout for each thing.

The programs of this folder run in the clients' own environments, so they use only the client and the standard library.
Their argument is a JSON object, here `CASE`: `url` (of the router), `key`, `slow_key` (with a rate limit), `model`,
`directory` (the served model as a Hugging Face directory), `question` and its greedy `answer`, `prompt` and its greedy
`continuation` of `max_tokens` tokens, `task` and `scores` (lm_eval_cli.py).
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

CASE = SimpleNamespace(**json.loads(sys.argv[1]))
MESSAGES = [{"role": "user", "content": CASE.question}]
# A question and its greedy answer, as keyword arguments of clients that speak OpenAI's API.
CHAT: dict[str, Any] = {"model": CASE.model, "messages": MESSAGES, "temperature": 0, "max_tokens": CASE.max_tokens}
COMPLETION: dict[str, Any] = {
    "model": CASE.model,
    "prompt": CASE.prompt,
    "temperature": 0,
    "max_tokens": CASE.max_tokens,
}
# A JSON schema and a tool, for what needs output that follows them.
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string"}},
    "required": ["capital"],
    "additionalProperties": False,
}
TOOL = {"name": "capital", "description": "Looks up the capital of a country.", "parameters": SCHEMA}
_REFUSALS = (400, 404, 501)


def report(what: str, result: str, said: str = "") -> None:
    print(json.dumps({"what": what, "result": result, "said": said}), flush=True)


@contextlib.contextmanager
def trying(what: str, *, is_to_come: bool = False) -> Iterator[None]:
    """Reports that it works, or the exception. is_to_come: Octavo does not have it yet, so it may be refused."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 # Whatever a client raises is its result.
        status = getattr(error, "status_code", None)
        is_refusal = is_to_come and status in _REFUSALS
        report(what, "refused" if is_refusal else "fails", f"{type(error).__name__}: {error}")
    else:
        report(what, "works")


def same(seen: object, expected: object) -> None:
    """Raises AssertionError if they differ."""
    if seen != expected:
        raise AssertionError(f"{seen!r}, not {expected!r}")


def check(is_so: object, otherwise: object) -> None:
    """Raises AssertionError with what was seen otherwise."""
    if not is_so:
        raise AssertionError(str(otherwise))


def run(*command: object, **environment: str) -> str:
    """Returns the stdout of a client's command. Raises AssertionError with the end of its output."""
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True
    )
    check(done.returncode == 0, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
    return done.stdout
