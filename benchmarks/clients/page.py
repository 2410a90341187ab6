"""Reads what the clients' programs report, and shows it as the matrix of docs/clients/http.md."""

import datetime
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.wire import octavo_version

_MAX_SAID = 300


@dataclass(frozen=True)
class Tried:
    """One thing that a program tried. result: works, refused, fails, not installed, or figure."""

    what: str
    result: str
    said: str


@dataclass(frozen=True)
class Outcome:
    """All that was tried with one client."""

    title: str
    version: str
    tried: Sequence[Tried]

    @property
    def has_failed(self) -> bool:
        return any(each.result == "fails" for each in self.tried)

    def of(self, result: str) -> list[Tried]:
        return [each for each in self.tried if each.result == result]


def outcome_of(title: str, version: str, done: subprocess.CompletedProcess[str]) -> Outcome:
    """Reads a program's output. A program that ends with an error has failed, whatever it reported before."""
    # Some clients print lines of their own.
    tried = [Tried(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"what":')]
    if done.returncode or not tried:
        tried.append(Tried("the program", "fails", f"exit code {done.returncode}: {done.stderr.strip()[-_MAX_SAID:]}"))
    return Outcome(title, version, tried)


def shown(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields the page's lines."""
    counts = {result: sum(len(each.of(result)) for each in outcomes) for result in ("works", "refused", "fails")}
    yield (
        f"{datetime.date.today()}, Octavo {octavo_version()}, SmolLM2-135M-Instruct in float32, two replicas on a CPU, "
        f"with API keys: {counts['works']} work, {counts['refused']} are refused, {counts['fails']} fail."
    )
    yield ""
    yield "| client | version | works |"
    yield "|---|---|---|"
    for each in outcomes:
        works = [tried.what for tried in each.of("works")]
        works += [f"{tried.what}: {tried.said}" for tried in each.of("figure")]
        yield f"| {each.title} | {each.version or 'not installed'} | {'<br>'.join(map(_cell, works))} |"
    for result, title in (("refused", "refused"), ("fails", "fails"), ("not installed", "not installed")):
        rows = [(each.title, tried) for each in outcomes for tried in each.of(result)]
        if rows:
            yield ""
            yield f"| client | {title} | the message |"
            yield "|---|---|---|"
            for name, tried in rows:
                yield f"| {name} | {_cell(tried.what)} | {_cell(_message(tried.said))} |"


def _message(said: str) -> str:
    """Returns the server's own sentence, if a client's error holds one, else the error, shortened."""
    # `{"error": {"message": "..."}}`, or `BadRequestError: Error code: 400 - ...`, or `Error: 400 ...`.
    found = re.search(r"""["']message["']: ?(["'])(.+?)\1[,}]""", said)
    return found[2] if found else re.sub(r"^\w+: (?:Error code: \d+ - |\d+ )", "", said)[:_MAX_SAID]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
