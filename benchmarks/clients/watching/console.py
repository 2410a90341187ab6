"""Checks the console in a headless Chromium, against a cluster that loses processes, and takes its pictures.

python -m benchmarks.clients.watching.console [--part page|images|growth] [--minutes 10] [--pictures docs/pictures]

page: an answer streams, is stopped, made again, fails and recovers; worker, scheduler and router are killed in the
middle of an answer, which ends as the undisturbed one; hostile output stays text; all is done by keys alone, at 360
pixels, in dark and light. images: attached, seen by the model, removed, refused. growth: the page stays open under
load, and is measured once a minute. Needs the program chromium; takes five minutes and --minutes.
"""

import argparse
import time
from functools import partial
from pathlib import Path

from benchmarks.clients.watching.browser import BrowserError, Page, chromium
from benchmarks.clients.watching.checks import ANSWER, IDLE, LINK, META, OVERFLOW, Checks
from benchmarks.clients.watching.growth import stays_small
from benchmarks.clients.watching.images import check_images, check_text_model
from benchmarks.clients.watching.load import Cluster, cluster, loaded

# Texts that a model might be made to write.
_HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202eabc\u001b[31mred\u0000 "
_LONG_LINE = 1_000_000


class ConsoleChecks(Checks):
    # --- Checks of the chat

    def streams(self) -> str:
        self.setting("max_tokens", "120")
        self.setting("seed", "7")
        self.ask()
        lengths = set()
        while not self.page.run(IDLE):
            lengths.add(self.length())
            time.sleep(0.05)
        assert len(lengths) > 5, f"the text grew in {len(lengths)} steps only"
        assert self.page.run("document.querySelectorAll('.log .token').length") > 50
        return f"{len(lengths)} lengths seen; {self.page.run(META)}"

    def is_stopped(self) -> str:
        self.setting("max_tokens", "2000")
        self.ask()
        self.page.wait(f"({ANSWER}).length > 40")
        self.page.key("Escape")
        self.page.wait(IDLE, 5)
        assert "stopped" in self.page.run(META), self.page.run(META)
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
        self.page.wait(f"!({IDLE})")
        assert self.whole() == first, "the same seed gave another answer"
        self.setting("seed", "8")
        self.press("Regenerate")
        self.page.wait(f"!({IDLE})")
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
        self.page.wait(f"!({IDLE})")
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
        began = time.monotonic()
        with self.answering({"content": _HOSTILE + "x" * _LONG_LINE}):
            self.say("x")
            self.page.wait(f"({ANSWER}).length > {_LONG_LINE}")
            self.page.wait(IDLE)
        seconds = time.monotonic() - began
        shown = self.page.run(f"({ANSWER}).slice(0, 200)")
        assert "<script>window.hacked = 1</script>" in shown
        assert "[U+202E]abc" in shown
        assert "\u241b[31m" in shown
        assert self.page.run("window.hacked === undefined && !document.querySelector('.log img, .log script')")
        assert not self.page.run(OVERFLOW), "the page is wider than the window"
        self.press("New chat")
        return f"1 MB in one line within {seconds:.1f} s"

    def shows_tool_calls(self) -> str:
        self.press("New chat")
        name, arguments = "get_weather", '{"city": "<img src=x onerror=\'window.hacked = 1\'>\u202e"}'
        call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": ""}}
        parts = [{"index": 0, "function": {"arguments": part}} for part in (arguments[:9], arguments[9:])]
        with self.answering({"tool_calls": [call]}, *({"tool_calls": [part]} for part in parts)):
            self.say("What is the weather?")
            shown = self.page.wait("document.querySelector('.log .call')?.textContent")
            self.page.wait(IDLE)
            self.say("And tomorrow?")
            self.page.wait("window.asked.length === 2")
            self.page.wait(IDLE)
        assert shown == f"{name}({arguments})".replace("\u202e", "[U+202E]"), shown
        assert self.page.run("window.hacked === undefined && !document.querySelector('.log img')")
        sent = self.page.run("window.asked[1].messages[1]")
        function = {"name": name, "arguments": arguments}
        assert sent["tool_calls"] == [{"id": "call-1", "type": "function", "function": function}], sent
        self.press("New chat")
        return shown

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
        self.page.wait(f"({ANSWER}).length > {len(expected) // 4}")
        # The cluster has two schedulers and workers; the stream is on one of them.
        victims = range(1 if module == "router" else 2)
        for process in [self.running.process(module, index) for index in victims]:
            process.kill()
        killed_at = self.length()
        assert killed_at < len(expected), "the answer had ended before"
        found = self.whole(180)
        assert found == expected, f"another answer: {found[:80]!r}... for {expected[:80]!r}..."
        self.page.wait(f"{LINK}.startsWith('live')", 60)
        return f"killed at character {killed_at} of {len(expected)}; {self.page.run(LINK)}"

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
            assert not self.page.run(OVERFLOW), f"{view} is wider than {width} pixels"
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
        with loaded(self.running, 10, max_tokens=200, prompt_words=900, is_even=True):
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
            self.press("Theme")
            time.sleep(1.5)
            self.picture("console-cluster")
            self.press("Theme")
            self.page.resize(1200, 800)
            self.page.run("location.hash = 'events'")
            time.sleep(1)
            self.picture("console-events")
        return f"in {self.pictures}"


def run(page: Page, running: Cluster, pictures: Path | None) -> int:
    """Returns how many checks failed."""
    checks = ConsoleChecks(page, running, pictures)
    page.prefer("light")
    checks.open()
    checks.check("an answer streams", checks.streams)
    checks.check("Esc stops it", checks.is_stopped)
    checks.check("it is made again", checks.is_made_again)
    checks.check("an error is shown, and recovered from", checks.recovers_from_an_error)
    checks.check("arrow keys tell how likely tokens were", checks.tells_how_likely)
    checks.check("hostile output stays text", checks.shows_hostile_output_as_text)
    checks.check("calls of tools are shown", checks.shows_tool_calls)
    for module in ("worker", "scheduler", "router"):
        checks.check(f"kill -9 of every {module} in the middle of an answer", partial(checks.survives, module))
    checks.check("keys alone", checks.works_by_keys_alone)
    checks.check("360 pixels", lambda: checks.is_as_wide_as(360))
    checks.check("dark and light", checks.is_dark_and_light)
    if pictures is not None:
        checks.check("pictures", checks.takes_pictures)
    checks.check("no request leaves the origin", checks.asked_nobody_else)
    return checks.num_failed


def watch(page: Page, running: Cluster, minutes: float) -> int:
    """Returns how many checks failed."""
    checks = Checks(page, running)
    checks.open("cluster")
    checks.check(f"{minutes:g} minutes under load", lambda: stays_small(checks, minutes))
    checks.check("no request leaves the origin, over time", checks.asked_nobody_else)
    return checks.num_failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the page stays open under load")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures; not given: none are taken")
    parser.add_argument("--part", choices=("all", "page", "images", "growth"), default="all")
    arguments = parser.parse_args()
    part, num_failed = arguments.part, 0
    try:
        with chromium() as browser:
            if part in ("all", "page"):
                with cluster() as running:
                    page = browser.open()
                    num_failed += run(page, running, arguments.pictures) + check_text_model(page, running)
                    page.close()
            if part in ("all", "images"):
                num_failed += check_images(browser)
            if part in ("all", "growth"):
                with cluster() as running:
                    num_failed += watch(browser.open(), running, arguments.minutes)
    except BrowserError as error:
        raise SystemExit(str(error)) from None
    raise SystemExit(num_failed > 0)


if __name__ == "__main__":
    main()
