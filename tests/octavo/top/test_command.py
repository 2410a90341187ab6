"""`octavo top` without its extra."""

import sys

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.client.errors import OctavoError


def test_without_textual_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("octavo.top.app", "octavo.top.app"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    result = CliRunner().invoke(app, ["top"])
    assert isinstance(result.exception, OctavoError)
    assert "pip install 'octavo[top]'" in str(result.exception)
