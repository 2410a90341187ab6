"""The common part of the console's checks: opens the page, asks it, and tells how each check went."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.clients.watching.browser import BrowserError, Page
from benchmarks.clients.watching.load import Cluster

QUESTION = "Tell me a long story about a lighthouse."
# Expressions of what the page shows.
ANSWER = "document.querySelector('.log article:last-child .answer')?.textContent ?? ''"
META = "document.querySelector('.log article:last-child .meta')?.textContent ?? ''"
IDLE = "document.querySelector('button.primary') && !document.querySelector('button.primary').disabled"
LINK = "document.getElementById('link').textContent"
OVERFLOW = "document.documentElement.scrollWidth > innerWidth"


class Checks:
    """Checks of one page, and how many failed. pictures: where they go; None: none are taken."""

    def __init__(self, page: Page, running: Cluster, pictures: Path | None = None) -> None:
        self.page, self.running, self.pictures = page, running, pictures
        self.num_failed = 0

    def check(self, name: str, act: Callable[[], str | None]) -> None:
        """Runs a check. act: returns a figure to show; raises BrowserError or AssertionError if it is not so."""
        began = time.monotonic()
        try:
            shown = act() or ""
            verdict = "ok"
        except (AssertionError, BrowserError) as error:
            verdict, shown = "FAILED", str(error)
            self.num_failed += 1
        print(f"{verdict:7}{time.monotonic() - began:6.1f} s  {name}  {shown}", flush=True)

    # --- Steps

    def open(self, view: str = "chat") -> None:
        self.page.go(f"{self.running.url}/console#{view}")
        self.page.wait("document.readyState === 'complete'")
        self.page.wait(f"{LINK}.startsWith('live')", 60)

    def setting(self, name: str, value: str) -> None:
        self.page.run(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")

    def say(self, text: str) -> None:
        self.page.run("location.hash = 'chat'; document.querySelector('.composer textarea').focus()")
        self.page.type(text)
        self.page.key("Enter", "\r")

    def ask(self, text: str = QUESTION) -> None:
        """Says it, and waits until the answer has begun."""
        self.say(text)
        self.page.wait(f"!({IDLE})")

    def press(self, label: str) -> None:
        found = f"[...document.querySelectorAll('button')].find((each) => each.textContent === {json.dumps(label)})"
        self.page.run(f"{found}.click()")

    def length(self) -> int:
        return self.page.run(f"({ANSWER}).length")

    def whole(self, seconds: float = 120.0) -> str:
        """Waits for the end of the answer, and returns it."""
        self.page.wait(IDLE, seconds)
        return self.page.run(ANSWER)

    @contextlib.contextmanager
    def answering(self, *deltas: dict[str, Any]) -> Iterator[None]:
        """Answers the page's requests for completions without a router, and at once; keeps them in `window.asked`."""
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        self.page.run(
            "window.asked = []; window.realFetch = window.fetch; window.fetch = async (path, options) => { if "
            "(!path.includes('completions')) return window.realFetch(path, options); "
            f"window.asked.push(JSON.parse(options.body)); return new Response({json.dumps(body)}) }}; 0"
        )
        try:
            yield
        finally:
            self.page.run("window.fetch = window.realFetch; 0")

    def picture(self, name: str) -> None:
        if self.pictures is not None:
            self.page.picture(self.pictures / f"{name}.png")

    # --- Checks

    def asked_nobody_else(self) -> str:
        foreign = [url for url in self.page.requests if not url.startswith(self.running.url)]
        assert not foreign, foreign
        assert not self.page.errors, self.page.errors
        return f"{len(self.page.requests)} requests, no exception, no breach of the policy"
