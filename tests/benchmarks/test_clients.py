"""benchmarks/clients: what a client's program reports becomes the matrix."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.clients.case import Case
from benchmarks.clients.catalogue import CLIENTS, PROGRAMS
from benchmarks.clients.page import outcome_of, shown

CASE = Case(
    url="",
    key="",
    slow_key="",
    model="m",
    directory="",
    question="",
    answer="",
    prompt="",
    continuation="",
    max_tokens=1,
    max_call_tokens=1,
    task="",
    scores=[],
)
PROGRAM = """
from report import same, trying

class RefusedError(Exception):
    status_code = 400

with trying("a sum"):
    same(1 + 1, 2)
with trying("a wrong sum"):
    same(1 + 1, 3)
with trying("what is to come", is_to_come=True):
    raise RefusedError("Error code: 400 - tools: not yet")
with trying("what is there"):
    raise RefusedError('{"error": {"message": "a | b", "type": "x"}}')
print("a line of the client's own")
"""


def _run(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(PROGRAMS)!r})\n{program}")
    return subprocess.run([sys.executable, path, CASE.json()], capture_output=True, text=True)


def test_what_works_is_refused_and_fails_has_its_place(tmp_path: Path) -> None:
    outcome = outcome_of("A client", "1.2", _run(tmp_path, PROGRAM))
    assert outcome.has_failed
    page = "\n".join(shown([outcome]))
    assert "1 work, 1 are refused, 2 fail." in page
    for row in (
        "| A client | 1.2 | a sum |",
        "| A client | what is to come | tools: not yet |",
        "| A client | a wrong sum | AssertionError: 2, not 3 |",
        r"| A client | what is there | a \| b |",
    ):
        assert row in page.splitlines()


def test_a_program_that_breaks_or_reports_nothing_has_failed(tmp_path: Path) -> None:
    broken = outcome_of("A client", "1.2", _run(tmp_path, PROGRAM.split("with")[0] + "import nothing_like_it"))
    (tried,) = broken.tried
    assert (tried.result, "No module named 'nothing_like_it'" in tried.said) == ("fails", True)
    assert outcome_of("A client", "1.2", _run(tmp_path, "")).has_failed


def test_each_client_has_its_program() -> None:
    assert {each.program for each in CLIENTS} == {
        path.name for path in PROGRAMS.iterdir() if path.is_file() and path.stem != "report"
    }
    assert {each.shown_package for each in CLIENTS} >= {"openai", "lm-eval", "vllm", "ai"}
    assert json.loads(CASE.json())["scores"] == []
