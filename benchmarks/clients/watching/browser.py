"""Drives a headless Chromium over the DevTools protocol, by a pipe: no port, no further package.

Needs the program chromium (Debian: `apt-get install chromium`).
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ANSWER_S = 60.0
_DIALOG_S = 10.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--enable-precise-memory-info"),
)


class Live(NamedTuple):
    """Figures of a page. heap_bytes: of JavaScript objects. num_nodes: of documents, and removed ones that something
    still refers to."""

    heap_bytes: int
    num_nodes: int
    num_listeners: int


class BrowserError(Exception):
    """Chromium is not there, or did not do what it was told; the message says what."""


class Browser:
    """One Chromium process with an empty profile."""

    def __init__(self, profile: str) -> None:
        """Raises BrowserError."""
        program = shutil.which("chromium")
        if program is None:
            raise BrowserError("there is no program chromium: apt-get install chromium")
        # It reads commands at file descriptor 3 and writes answers at 4.
        its_in, commands = os.pipe()
        answers, its_out = os.pipe()
        shell = f'exec "$0" "$@" 3<&{its_in} 4>&{its_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(its_in, its_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        self._commands, self._answers = os.fdopen(commands, "wb", buffering=0), os.fdopen(answers, "rb", buffering=0)
        self._lock, self._arrived = threading.Lock(), threading.Condition()
        self._number = 0
        self._results: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._gone = False
        threading.Thread(target=self._read, name="chromium", daemon=True).start()

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol. Raises BrowserError."""
        with self._lock:
            self._number += 1
            number = self._number
            message = {"id": number, "method": method, "params": parameters}
            if session:
                message["sessionId"] = session
            self._commands.write(json.dumps(message).encode() + b"\0")
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._results or self._gone, _ANSWER_S):
                raise BrowserError(f"chromium has not answered {method} for {_ANSWER_S:g} s")
            if number not in self._results:
                raise BrowserError(f"chromium has gone during {method}")
            answer = self._results.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, *, width: int = 1200, height: int = 800) -> "Page":
        """Opens an empty page."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        return page

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()

    def _read(self) -> None:
        rest = b""
        while piece := self._answers.read(1 << 16):
            *messages, rest = (rest + piece).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    with self._arrived:
                        self._results[message["id"]] = message
                        self._arrived.notify_all()
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.note(message["method"], message["params"])
        with self._arrived:
            self._gone = True
            self._arrived.notify_all()


class Page:
    """One page. requests: URLs that it asked for. num_bytes: of what came. errors: exceptions, and what breaks its
    security policy."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.num_bytes = 0
        self.errors: list[str] = []
        # Elements that have asked for files.
        self._choosers: list[int] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Takes an event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.dataReceived":
            # encodedDataLength is 0 for parts of a stream.
            self.num_bytes += parameters["encodedDataLength"] or parameters["dataLength"]
        elif method == "Page.fileChooserOpened":
            self._choosers.append(parameters["backendNodeId"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            entry = parameters["entry"]
            # A router that is down is what some checks are about.
            if entry["level"] == "error" and entry["source"] != "network":
                self.errors.append(entry["text"])

    def close(self) -> None:
        self.send("Page.close")

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited if it is a promise. Raises BrowserError."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(f"{script!r}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true; returns its value. Raises BrowserError."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(BrowserError):
                if value := self.run(script):
                    return value
            if time.monotonic() > deadline:
                raise BrowserError(f"not so within {seconds:g} s: {script}; errors: {self.errors[-3:]}")
            time.sleep(0.05)

    def key(self, key: str, text: str = "") -> None:
        """Presses and releases a key, such as `Enter`. text: what it types."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
        given = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        self.send("Input.insertText", text=text)

    def choose(self, act: Callable[[], None], files: Sequence[Path]) -> None:
        """Answers the dialog that `act` opens with files. Raises BrowserError."""
        self.send("Page.setInterceptFileChooserDialog", enabled=True)
        act()
        deadline = time.monotonic() + _DIALOG_S
        while not self._choosers:
            if time.monotonic() > deadline:
                raise BrowserError(f"no dialog for files has opened within {_DIALOG_S:g} s")
            time.sleep(0.02)
        self.send("DOM.setFileInputFiles", files=[str(file) for file in files], backendNodeId=self._choosers.pop())
        self.send("Page.setInterceptFileChooserDialog", enabled=False)

    def drop(self, selector: str, files: Sequence[Path]) -> None:
        """Drags files from outside onto the middle of an element, and drops them there."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer(self, theme: str) -> None:
        """theme: dark or light."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def picture(self, path: Path) -> None:
        """Writes a screenshot, with few colours so that it is small."""
        from io import BytesIO

        from PIL import Image

        data = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(BytesIO(data)).convert("RGB").quantize(224).save(path, optimize=True)

    def live(self) -> Live:
        """Returns what is in use after a collection."""
        self.send("HeapProfiler.collectGarbage")
        found = {each["name"]: each["value"] for each in self.send("Performance.getMetrics")["metrics"]}
        return Live(*(int(found[name]) for name in ("JSHeapUsedSize", "Nodes", "JSEventListeners")))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Runs a browser. Raises BrowserError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            yield browser
        finally:
            browser.close()
