"""Checks the console in a headless Chromium, against a cluster that loses processes, and takes its pictures.

python -m benchmarks.clients.watching.console [--minutes 10] [--pictures docs/pictures]

An answer streams, is stopped, made again, fails and recovers; worker, scheduler and router are killed in the middle of
an answer, which ends as the undisturbed one; hostile output stays text; all is done by keys alone, at 360 pixels, in
dark and light; and the page stays open under load without growth. Needs the program chromium; takes four minutes and
--minutes.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.clients.watching.browser import BrowserError, Page, chromium
from benchmarks.clients.watching.load import Cluster, cluster, loaded

QUESTION = "Tell me a long story about a lighthouse."
_ANSWER = "document.querySelector('.log article:last-child .answer')?.textContent ?? ''"
_META = "document.querySelector('.log article:last-child .meta')?.textContent ?? ''"
_IDLE = "document.querySelector('button.primary') && !document.querySelector('button.primary').disabled"
_LINK = "document.getElementById('link').textContent"
_OVERFLOW = "document.documentElement.scrollWidth > innerWidth"
# Texts that a model might be made to write.
_HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202eabc\u001b[31mred\u0000 "
_LONG_LINE = 1_000_000


class Checks:
    """The checks of one page, and their verdicts."""

    def __init__(self, page: Page, running: Cluster, pictures: Path | None) -> None:
        self.page, self.running, self.pictures = page, running, pictures
        self.verdicts: list[tuple[str, str]] = []

    def check(self, name: str, act: Callable[[], str | None]) -> None:
        """Runs a check. act: returns a figure to show; raises BrowserError or AssertionError if it is not so."""
        began = time.monotonic()
        try:
            shown = act() or ""
            verdict = "ok"
        except (AssertionError, BrowserError) as error:
            verdict, shown = "FAILED", str(error)
        self.verdicts.append((name, verdict))
        print(f"{verdict:7}{time.monotonic() - began:6.1f} s  {name}  {shown}", flush=True)

    # --- Steps

    def open(self, view: str = "chat") -> None:
        self.page.go(f"{self.running.url}/console#{view}")
        self.page.wait("document.readyState === 'complete'")
        self.page.wait(f"{_LINK}.startsWith('live')", 60)

    def setting(self, name: str, value: str) -> None:
        self.page.run(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")

    def ask(self, text: str = QUESTION) -> None:
        self.page.run("location.hash = 'chat'; document.querySelector('.composer textarea').focus()")
        self.page.type(text)
        self.page.key("Enter", "\r")
        self.page.wait(f"!({_IDLE})")

    def press(self, label: str) -> None:
        found = f"[...document.querySelectorAll('button')].find((each) => each.textContent === {json.dumps(label)})"
        self.page.run(f"{found}.click()")

    def length(self) -> int:
        return self.page.run(f"({_ANSWER}).length")

    def whole(self, seconds: float = 120.0) -> str:
        """Waits for the end of the answer, and returns it."""
        self.page.wait(_IDLE, seconds)
        return self.page.run(_ANSWER)

    def picture(self, name: str) -> None:
        if self.pictures is not None:
            self.page.picture(self.pictures / f"{name}.png")

    # --- Checks of the chat

    def streams(self) -> str:
        self.setting("max_tokens", "120")
        self.setting("seed", "7")
        self.ask()
        lengths = set()
        while not self.page.run(_IDLE):
            lengths.add(self.length())
            time.sleep(0.05)
        assert len(lengths) > 5, f"the text grew in {len(lengths)} steps only"
        assert self.page.run("document.querySelectorAll('.log .token').length") > 50
        return f"{len(lengths)} lengths seen; {self.page.run(_META)}"

    def is_stopped(self) -> str:
        self.setting("max_tokens", "2000")
        self.ask()
        self.page.wait(f"({_ANSWER}).length > 40")
        self.page.key("Escape")
        self.page.wait(_IDLE, 5)
        assert "stopped" in self.page.run(_META), self.page.run(_META)
        length = self.length()
        self.page.run("location.hash = 'requests'")
        self.page.wait("document.querySelector('#requests .dim').textContent.startsWith('0 live')", 10)
        self.page.run("location.hash = 'chat'")
        assert self.length() == length
        return f"after {length} characters; the router has no live request"

    def is_made_again(self) -> str:
        self.press("New chat")
        self.setting("max_tokens", "40")
        self.ask()
        first = self.whole()
        self.press("Regenerate")
        self.page.wait(f"!({_IDLE})")
        assert self.whole() == first, "the same seed gave another answer"
        self.setting("seed", "8")
        self.press("Regenerate")
        self.page.wait(f"!({_IDLE})")
        assert self.whole() != first, "another seed gave the same answer"
        assert self.page.run("document.querySelectorAll('.log article').length") == 2
        return "the same with its seed, another with another"

    def recovers_from_an_error(self) -> str:
        self.press("New chat")
        self.setting("top_p", "7")
        self.ask()
        shown = self.page.wait("document.querySelector('.log .error').textContent")
        assert "top_p" in shown, shown
        self.setting("top_p", "")
        self.press("Regenerate")
        self.page.wait(f"!({_IDLE})")
        assert self.whole()
        return shown

    def tells_how_likely(self) -> str:
        self.page.run("document.querySelector('.log .answer').focus()")
        self.page.key("ArrowRight")
        self.page.key("ArrowRight")
        tip = self.page.wait("document.querySelector('.tip:not([hidden])')?.textContent")
        assert tip.count("%") >= 5, tip
        return f"{tip[:60]}..."

    def shows_hostile_output_as_text(self) -> str:
        self.press("New chat")
        text = _HOSTILE + "x" * _LONG_LINE
        chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        script = (
            "window.realFetch = window.fetch; window.fetch = async (path, ...rest) => path.includes('completions') ? "
            f"new Response({json.dumps(body)}, {{status: 200}}) : window.realFetch(path, ...rest)"
        )
        self.page.run(f"{script}; 0")
        began = time.monotonic()
        self.page.run("document.querySelector('.composer textarea').focus()")
        self.page.type("x")
        self.page.key("Enter", "\r")
        self.page.wait(f"({_ANSWER}).length > {_LONG_LINE}")
        self.page.wait(_IDLE)
        seconds = time.monotonic() - began
        shown = self.page.run(f"({_ANSWER}).slice(0, 200)")
        assert "<script>window.hacked = 1</script>" in shown
        assert "[U+202E]abc" in shown
        assert "\u241b[31m" in shown
        assert self.page.run("window.hacked === undefined && !document.querySelector('.log img, .log script')")
        assert not self.page.run(_OVERFLOW), "the page is wider than the window"
        self.page.run("window.fetch = window.realFetch; 0")
        self.press("New chat")
        return f"1 MB in one line within {seconds:.1f} s"

    # --- Losses

    def survives(self, module: str) -> str:
        self.press("New chat")
        self.setting("max_tokens", "150")
        self.setting("seed", "11")
        self.setting("temperature", "0.7")
        self.ask()
        expected = self.whole()
        self.press("New chat")
        self.ask()
        self.page.wait(f"({_ANSWER}).length > {len(expected) // 4}")
        # The cluster has two schedulers and workers; the stream is on one of them.
        victims = range(1 if module == "router" else 2)
        for process in [self.running.process(module, index) for index in victims]:
            process.kill()
        killed_at = self.length()
        assert killed_at < len(expected), "the answer had ended before"
        found = self.whole(180)
        assert found == expected, f"another answer: {found[:80]!r}... for {expected[:80]!r}..."
        self.page.wait(f"{_LINK}.startsWith('live')", 60)
        return f"killed at character {killed_at} of {len(expected)}; {self.page.run(_LINK)}"

    # --- The looks of it

    def works_by_keys_alone(self) -> str:
        self.page.run("location.hash = 'chat'; document.activeElement.blur()")
        for _ in range(12):
            self.page.key("Tab")
            if self.page.run("document.activeElement.id") == "tab-chat":
                break
        assert self.page.run("document.activeElement.id") == "tab-chat", "Tab does not reach the views"
        seen = []
        for _ in range(4):
            self.page.key("ArrowRight")
            time.sleep(0.2)
            seen.append(self.page.run("document.querySelector('[role=tabpanel]:not([hidden])').id"))
        assert seen == ["cluster", "requests", "events", "chat"], seen
        return "Tab and arrows reach all views"

    def is_as_wide_as(self, width: int) -> str:
        self.page.resize(width, 740)
        for view in ("chat", "cluster", "requests", "events"):
            self.page.run(f"location.hash = '{view}'")
            time.sleep(1.2)
            assert not self.page.run(_OVERFLOW), f"{view} is wider than {width} pixels"
            if view == "cluster":
                self.picture("console-narrow")
        self.page.resize(1200, 800)
        return "no view is wider"

    def is_dark_and_light(self) -> str:
        colours = []
        for theme in ("dark", "light"):
            self.page.prefer(theme)
            time.sleep(0.2)
            colours.append(self.page.run("getComputedStyle(document.body).backgroundColor"))
        self.press("Theme")
        assert self.page.run("getComputedStyle(document.body).backgroundColor") == colours[0], "the button does nothing"
        self.press("Theme")
        assert colours[0] != colours[1]
        return " and ".join(colours)

    def takes_pictures(self) -> str:
        self.press("New chat")
        self.setting("max_tokens", "200")
        self.setting("seed", "3")
        with loaded(self.running, 10, max_tokens=300, prompt_words=900):
            self.ask("What is the capital of France, and what is it known for?")
            self.whole()
            self.page.run("document.querySelector('.log .answer').focus()")
            for _ in range(8):
                self.page.key("ArrowRight")
            self.picture("console-chat")
            self.press("timeline")
            self.page.wait("document.querySelector('.timeline').childElementCount")
            shown = self.page.run("document.querySelector('.timeline .error')?.textContent ?? ''")
            assert not shown, shown
            time.sleep(1.5)
            self.picture("console-requests")
            self.page.run("location.hash = 'cluster'")
            time.sleep(8)
            self.page.resize(1200, 900)
            self.page.prefer("dark")
            time.sleep(1.5)
            self.picture("console-cluster")
            self.page.prefer("light")
            self.page.run("location.hash = 'events'")
            time.sleep(1)
            self.picture("console-events")
        return f"in {self.pictures}"

    def stays_small(self, minutes: float) -> str:
        """Open under load: memory, nodes and the delay of a timer, a minute after the start and at the end."""
        self.page.run("location.hash = 'cluster'")
        self.page.run(
            "window.shift = 0; new PerformanceObserver((list) => list.getEntries().forEach((each) => "
            "{ if (!each.hadRecentInput) window.shift += each.value })).observe({type: 'layout-shift'}); 0"
        )
        lag = (
            "new Promise((resolve) => { let worst = 0, left = 40, last = performance.now(); const timer = setInterval("
            "() => { const now = performance.now(); worst = Math.max(worst, now - last - 50); last = now; "
            "if (!--left) { clearInterval(timer); resolve(worst) } }, 50) })"
        )
        with loaded(self.running, 8):
            time.sleep(min(60, 20 * minutes))
            heap, nodes, first_lag = self.page.heap_bytes(), self.page.num_nodes(), self.page.run(lag)
            time.sleep(60 * minutes)
            heap_now, nodes_now, last_lag = self.page.heap_bytes(), self.page.num_nodes(), self.page.run(lag)
        shift = self.page.run("window.shift")
        shown = (
            f"heap {heap / 1e6:.1f} to {heap_now / 1e6:.1f} MB, nodes {nodes} to {nodes_now}, worst timer "
            f"{first_lag:.0f} to {last_lag:.0f} ms late, layout shift {shift:.3f}"
        )
        # The list of happenings fills up to its bound, 300 rows of eight nodes.
        assert heap_now < heap + 4e6, shown
        assert nodes_now < nodes + 4000, shown
        assert shift < 0.1, shown
        return shown

    def asked_nobody_else(self) -> str:
        foreign = [url for url in self.page.requests if not url.startswith(self.running.url)]
        assert not foreign, foreign
        assert not self.page.errors, self.page.errors
        return f"{len(self.page.requests)} requests, no exception, no breach of the policy"


def run(page: Page, running: Cluster, pictures: Path | None, minutes: float) -> bool:
    checks = Checks(page, running, pictures)
    page.prefer("light")
    checks.open()
    checks.check("an answer streams", checks.streams)
    checks.check("Esc stops it", checks.is_stopped)
    checks.check("it is made again", checks.is_made_again)
    checks.check("an error is shown, and recovered from", checks.recovers_from_an_error)
    checks.check("arrow keys tell how likely tokens were", checks.tells_how_likely)
    checks.check("hostile output stays text", checks.shows_hostile_output_as_text)
    for module in ("worker", "scheduler", "router"):
        checks.check(f"kill -9 of every {module} in the middle of an answer", partial(checks.survives, module))
    checks.check("keys alone", checks.works_by_keys_alone)
    checks.check("360 pixels", lambda: checks.is_as_wide_as(360))
    checks.check("dark and light", checks.is_dark_and_light)
    if pictures is not None:
        checks.check("pictures", checks.takes_pictures)
    if minutes:
        checks.check(f"{minutes:g} minutes under load", lambda: checks.stays_small(minutes))
    checks.check("no request leaves the origin", checks.asked_nobody_else)
    return all(verdict == "ok" for _, verdict in checks.verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the page stays open under load")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures; not given: none are taken")
    arguments = parser.parse_args()
    try:
        with cluster() as running, chromium() as browser:
            good = run(browser.open(), running, arguments.pictures, arguments.minutes)
    except BrowserError as error:
        raise SystemExit(str(error)) from None
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
