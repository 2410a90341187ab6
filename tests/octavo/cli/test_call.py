"""The requests of `octavo chat` and `octavo complete`."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from octavo import Constraint, SamplingParams
from octavo.cli import call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    found: list[SamplingParams] = []
    monkeypatch.setattr(call, "_stream", lambda *args, **options: found.append(args[2]))
    return found


def _run(*words: str) -> int:
    app = typer.Typer()
    call.register(app, "Ask a model")
    return CliRunner().invoke(app, list(words)).exit_code


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_flags_say_what_the_output_must_be(command: str, asked: list[SamplingParams], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert _run(command, "Hi", f"--json-schema={schema}") == 0
    assert _run(command, "Hi", "--regex=[a-z]+") == 0
    assert _run(command, "Hi", "--choice=yes", "--choice=no") == 0
    assert _run(command, "Hi") == 0
    assert [each.constraint for each in asked] == [
        Constraint(json='{"type": "object"}'),
        Constraint(regex="[a-z]+"),
        Constraint(choice=["yes", "no"]),
        None,
    ]


def test_a_schema_that_is_not_there_is_an_error_of_the_flag(asked: list[SamplingParams], tmp_path: Path) -> None:
    assert _run("chat", "Hi", f"--json-schema={tmp_path / 'none.json'}") == 2
    assert not asked


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_flag_bounds_drafts(command: str, asked: list[SamplingParams]) -> None:
    assert _run(command, "Hi", "--num-speculative-tokens=0") == 0
    assert _run(command, "Hi", "--num-speculative-tokens=3") == 0
    assert [each.num_speculative_tokens for each in asked] == [0, 3]
