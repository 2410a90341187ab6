"""Checks of images in the console's chat, against a tiny Qwen2.5-VL with random weights, and a model of text."""

import base64
import http.client
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.clients.watching.browser import Browser, Page
from benchmarks.clients.watching.checks import OVERFLOW, Checks
from benchmarks.clients.watching.load import HOST, Cluster, cluster

_MOST_IMAGES, _MOST_MIB = 3, 0.1
_FLAGS = (
    *("--data-parallel-size=1", "--dtype=float32", "--max-num-seqs=8", "--max-model-len=1024"),
    *(f'--limit-mm-per-prompt={{"image": {_MOST_IMAGES}, "video": 0}}', f"--max-item-mib={_MOST_MIB}"),
)
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)
_SEED, _MAX_TOKENS = 5, 24
_COMPOSED = "document.querySelectorAll('.attached figure').length"
_REFUSAL = "document.querySelector('.attached .error').textContent"
_SENT = "document.querySelectorAll('.log .user canvas').length"
_BUTTON = "[...document.querySelectorAll('.composer .row button')].find((each) => each.textContent === 'Attach image')"
# Small pictures that show one colour only were not drawn.
_DRAWN = (
    "[...document.querySelectorAll('.attached canvas')].map((canvas) => new Set(new Uint32Array(canvas.getContext('2d')"
    ".getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size)"
)


class ImageChecks(Checks):
    def __init__(self, page: Page, running: Cluster, directory: Path) -> None:
        """directory: where files for the page are written."""
        super().__init__(page, running)
        self._directory = directory

    def are_refused_by_a_model_of_text(self) -> str:
        self.page.run("location.hash = 'chat'")
        self.press("New chat")
        self.page.wait(f"{_BUTTON}.getAttribute('aria-disabled') === 'true'")
        self._press_attach()
        refusal = self.page.wait(_REFUSAL)
        assert "takes text only" in refusal, refusal
        self._paste(self._file("cat.png"))
        assert self.page.wait(_REFUSAL) == refusal
        assert self.page.run(_COMPOSED) == 0
        return refusal

    def are_attached(self) -> str:
        """By button and keys, by paste and by drop; two are removed by keys."""
        self.page.wait(f"{_BUTTON}.getAttribute('aria-disabled') === 'false'", 30)
        said = self.page.run(f"{_BUTTON}.title")
        assert "103 KiB" in said, said
        first, second, third = (self._file(f"{i}.{form}", seed=i) for i, form in enumerate(("png", "jpeg", "webp")))
        self.page.choose(self._press_attach, [first])
        self.page.wait(f"{_COMPOSED} === 1")
        self._paste(second)
        self.page.wait(f"{_COMPOSED} === 2")
        self.page.drop(".log", [third])
        self.page.wait(f"{_COMPOSED} === 3")
        colours = self.page.run(_DRAWN)
        assert all(count > 20 for count in colours), f"pictures of {colours} colours"
        self.page.resize(360, 740)
        assert not self.page.run(OVERFLOW), "the page is wider than 360 pixels"
        self.page.resize(1200, 800)
        self.page.run("document.querySelector('.attached .remove').focus()")
        for left in (2, 1):
            self.page.key("Enter", "\r")
            self.page.wait(f"{_COMPOSED} === {left}")
            assert self.page.run("document.activeElement.className") == "remove", "the focus is lost"
        kept = self.page.run("document.querySelector('.attached canvas').getAttribute('aria-label')")
        assert kept == third.name, kept
        self.page.key("Enter", "\r")
        self.page.wait(f"{_COMPOSED} === 0")
        assert self.page.run("document.activeElement.tagName") == "TEXTAREA", "the focus is lost"
        return f"three of them, drawn in {colours} colours; {said}"

    def are_seen_by_the_model(self) -> str:
        """The answers of a chat with images are those that the API gives; an image counts in later questions, too."""
        self.press("New chat")
        for name, value in (("temperature", "1"), ("seed", str(_SEED)), ("max_tokens", str(_MAX_TOKENS))):
            self.setting(name, value)
        file, other = self._file("this.png", seed=7), self._file("that.png", seed=8)
        self._paste(file)
        self.page.wait(f"{_COMPOSED} === 1")
        self.ask("What is this?")
        found = self.whole()
        messages: list[Any] = [{"role": "user", "content": _content("What is this?", file)}]
        answers = {
            image.name: self._answer([{"role": "user", "content": _content("What is this?", image)}])
            for image in (file, other)
        }
        assert answers[file.name] != answers[other.name], "the model does not tell these images apart"
        assert found == self._shown(answers[file.name]), f"{found!r}, and the API: {answers[file.name]!r}"
        assert self.page.run(_SENT) == 1
        self._paste(other)
        self.page.wait(f"{_COMPOSED} === 1")
        self.ask("And this?")
        second = self.whole()
        messages += [
            {"role": "assistant", "content": answers[file.name]},
            {"role": "user", "content": _content("And this?", other)},
        ]
        expected = self._answer(messages)
        assert second == self._shown(expected), f"{second!r}, and the API: {expected!r}"
        self.press("Regenerate")
        self.page.wait("document.querySelector('button.primary').disabled")
        assert self.whole() == second, "made again with the same seed, the answer differs"
        return f"{len(found)} and {len(second)} characters as the API answers, made again as well"

    def are_bounded(self) -> str:
        """The page refuses files that the router would refuse, unsent; of several it takes the good ones."""
        self.press("New chat")
        text, broken, large = (self._directory / name for name in ("note.txt", "broken.png", "large.png"))
        text.write_text("not an image")
        broken.write_bytes(b"\x89PNG\r\n\x1a\n broken")
        self._file(large.name, side=500)
        assert large.stat().st_size > _MOST_MIB * 2**20, "the large image is too small"
        seen = []
        for file, wanted in (
            (text, "text/plain: use PNG"),
            (broken, "can't be read as an image"),
            (large, "an image may have 103 KiB"),
        ):
            self.page.drop(".log", [file])
            seen.append(self.page.wait(f"{_REFUSAL}.includes({json.dumps(wanted)}) && {_REFUSAL}"))
            assert self.page.run(_COMPOSED) == 0
        self.page.drop(".log", [self._file(f"{i}.png", seed=i) for i in range(_MOST_IMAGES + 1)])
        self.page.wait(f"{_COMPOSED} === {_MOST_IMAGES}")
        seen.append(self.page.wait(f"{_REFUSAL}.includes('which may have {_MOST_IMAGES}') && {_REFUSAL}"))
        return "; ".join(seen)

    # --- Steps

    def _press_attach(self) -> None:
        self.page.run(f"{_BUTTON}.focus()")
        self.page.key("Enter", "\r")

    def _paste(self, file: Path) -> None:
        data = json.dumps(base64.b64encode(file.read_bytes()).decode())
        kind, name = json.dumps(_type(file)), json.dumps(file.name)
        self.page.run(
            "{ const data = new DataTransfer(); data.items.add(new File([Uint8Array.from(atob("
            f"{data}), (char) => char.charCodeAt(0))], {name}, {{type: {kind}}})); "
            "document.querySelector('.composer textarea').dispatchEvent(new ClipboardEvent('paste', "
            "{clipboardData: data, bubbles: true, cancelable: true})) } 0"
        )

    def _file(self, name: str, *, seed: int = 0, side: int = 90) -> Path:
        from tests.support.models.vision_models import file_of, picture

        file = self._directory / name
        file.write_bytes(file_of(picture(side, side // 2, seed), file.suffix[1:].upper()))
        return file

    def _shown(self, text: str) -> str:
        """Returns a text as the page shows it: control characters by name."""
        return self.page.run(f"import('/console/static/dom.js').then(({{visible}}) => visible({json.dumps(text)}))")

    def _answer(self, messages: Sequence[Any]) -> str:
        """Returns the API's answer with the page's settings."""
        body = {
            "messages": messages,
            "temperature": 1,
            "seed": _SEED,
            "max_tokens": _MAX_TOKENS,
            "logprobs": True,
            "top_logprobs": 5,
        }
        with closing(http.client.HTTPConnection(HOST, self.running.http_port, timeout=60)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = json.load(connection.getresponse())
        assert "choices" in answer, answer
        return answer["choices"][0]["message"]["content"]


def _type(file: Path) -> str:
    return f"image/{file.suffix[1:]}"


def _content(text: str, *files: Path) -> list[Any]:
    urls = [f"data:{_type(file)};base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


@contextmanager
def image_cluster(directory: Path) -> Iterator[Cluster]:
    """Runs the tiny model, whose files it writes."""
    # Imports transformers, which takes seconds.
    from tests.support.models.vision_models import qwen2_5_vl, write_model

    model = directory / "model"
    write_model(qwen2_5_vl, model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    with cluster(*_FLAGS, model=(f"--model={model}", "--served-model-name=tiny-vision")) as running:
        yield running


def check_images(browser: Browser) -> int:
    """Returns how many checks failed."""
    with tempfile.TemporaryDirectory() as name, image_cluster(Path(name)) as running:
        checks = ImageChecks(browser.open(), running, Path(name))
        checks.page.prefer("light")
        checks.open()
        checks.check("images by button, paste and drop, removed by keys", checks.are_attached)
        checks.check("images are seen by the model", checks.are_seen_by_the_model)
        checks.check("images beyond the limits are refused", checks.are_bounded)
        checks.check("no request leaves the origin, with images", checks.asked_nobody_else)
        checks.page.close()
        return checks.num_failed


def check_text_model(page: Page, running: Cluster) -> int:
    """Returns how many checks failed."""
    with tempfile.TemporaryDirectory() as name:
        checks = ImageChecks(page, running, Path(name))
        checks.check("images are refused for a model of text", checks.are_refused_by_a_model_of_text)
        return checks.num_failed
