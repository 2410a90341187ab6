"""The .proto files can be read by the version before: nothing is removed or changes its meaning.

`buf breaking` checks the same, by buf.yaml.
"""

import subprocess
from pathlib import Path

import pytest

from tests.support.breaking_changes import breaking_changes, compiled
from tests.support.repository import ROOT, files, name

BEFORE = """
syntax = "proto3";
package p;
service S { rpc Call(A) returns (stream A); }
message A {
  int32 a = 1;
  repeated string b = 2;
  E e = 3;
  oneof either { bool c = 4; bool d = 5; }
  message Inner { int32 x = 1; }
  enum E { NONE = 0; ONE = 1; }
}
"""

# Calls that were refused whatever their messages said, before they were supported: clients send what vLLM's files say.
ALLOWED = {
    f"vllm.Control.{call} was (.vllm.Unread) -> .vllm.Unread and is (.vllm.{call}Request) -> .vllm.{call}Response"
    for call in ("PauseGeneration", "ResumeGeneration")
}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_last_commit_can_be_read(tmp_path: Path) -> None:
    """Compares with the last commit, or with the one before it if nothing has changed since."""
    try:
        base = "HEAD" if _git("status", "--porcelain", "--", "*.proto") else "HEAD~1"
        before = [path for path in _git("ls-tree", "-r", "--name-only", base).split() if path.endswith(".proto")]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no commit to compare with: {error}")
    for path in before:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(_git("show", f"{base}:{path}"))
    now = [name(path) for path in files(".proto")]
    found = set(breaking_changes(compiled(tmp_path, before), compiled(ROOT, now)))
    assert not found - ALLOWED, "\n".join(sorted(found - ALLOWED))


def _changes(tmp_path: Path, *replaced: tuple[str, str]) -> list[str]:
    """The rules that the replacements in BEFORE break."""
    after = BEFORE
    for old, new in replaced:
        assert old in after
        after = after.replace(old, new)
    found = []
    for folder, text in ((tmp_path / "old", BEFORE), (tmp_path / "new", after)):
        folder.mkdir()
        (folder / "p.proto").write_text(text)
        found.append(compiled(folder, ["p.proto"]))
    return breaking_changes(*found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int32 a = 1;", "", "p.A.a is gone: write `reserved 1;`"),
        ("int32 a = 1;", "int64 a = 1;", "p.A.a = 1 was int32 and is int64"),
        ("int32 a = 1;", "int32 a = 9;", "p.A.a is gone"),
        ("repeated string b", "string b", "p.A.b = 2 was repeated string and is string"),
        ("message Inner { int32 x = 1; }", "", "p.A.Inner is gone"),
        ("ONE = 1;", "", "p.A.E.ONE is gone"),
        ("rpc Call(A) returns (stream A);", "", "p.S.Call is gone"),
        ("returns (stream A)", "returns (A)", "streams in another direction"),
        ("Call(A)", "Call(A.Inner)", "p.S.Call was (.p.A) -> .p.A and is (.p.A.Inner)"),
        ("bool c = 4; bool d = 5; }", "bool d = 5; } bool c = 4;", "has come into a oneof, or out of one"),
    ],
)
def test_what_would_be_misread_is_found(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in "\n".join(_changes(tmp_path, (old, new)))


def test_what_only_adds_or_renames_breaks_nothing(tmp_path: Path) -> None:
    assert not _changes(
        tmp_path,
        ("int32 a = 1;", "reserved 1; int32 added = 6;"),
        ("ONE = 1;", "reserved 1; TWO = 2;"),
        ("string b", "string renamed"),
        ("E e = 3;", "optional E e = 3;"),
    )
