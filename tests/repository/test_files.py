"""Rules of the repository that no reviewer should have to remember."""

import re

import pytest

from configs.load import _ENV_RESERVED
from configs.options import Options
from tests.support.repository import ROOT, files, is_generated, name

SOURCES = (".py", ".cpp", ".h", ".sh", ".proto", ".yaml", ".yml", ".toml")
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
MAX_LINES = 600
# A longer file must say at its top, in a comment or docstring, why it is still one subject.
LONG_FILE_REASON = re.compile(r"Longer than [46]00 lines because .{20,}", re.S)

# Folders of one machine. In pieces, so that the pattern does not match this file.
MACHINE_PATHS = re.compile("|".join(rf"(?<![\w.$~}}/-])/{folder}/" for folder in ("work", "root", "home", "tmp")))
OPTION_IN_ENVIRONMENT = re.compile(r"\bOCTAVO_([A-Z][A-Z_]*[A-Z])\b")


def text_files():
    return [path for path in files(*SOURCES, ".md", "") if not is_generated(path) and path.name != "LICENSE"]


def test_a_file_has_one_subject_or_says_why_it_is_long():
    long = [
        name(path)
        for path in files(*SOURCES)
        if not is_generated(path)
        and len(lines := path.read_text().splitlines()) > MAX_LINES
        and not LONG_FILE_REASON.search("\n".join(lines[:20]))
    ]
    assert not long, f"over {MAX_LINES} lines; split, or begin with 'Longer than 600 lines because ...': {long}"


def test_a_test_file_needs_no_other():
    """Helpers of several test files lie in tests/support."""
    found = [
        f"{name(path)}: {each}"
        for path in files(".py", under=ROOT / "tests")
        for each in re.findall(r"^ *(?:from|import) tests\.[\w.]*\btest_\w+", path.read_text(), re.M)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_folder_of_somebodys_machine():
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_option_is_in_the_documentation():
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    missing = [option for option in Options.model_fields if f"`{option}" not in text]
    assert not missing, f"docs/*.md does not mention {missing}"


def test_every_option_that_documents_and_deployments_name_exists():
    paths = [*DOCUMENTS, *files(under=ROOT / "deploy")]
    paths += [ROOT / name for name in ("Makefile", "Dockerfile", "docker-compose.yml")]
    known = {option.upper() for option in Options.model_fields}
    unknown = {
        f"{name(path)}: OCTAVO_{option}"
        for path in paths
        if path.exists()
        for option in OPTION_IN_ENVIRONMENT.findall(path.read_text())
        if option not in known and f"OCTAVO_{option}" not in _ENV_RESERVED
    }
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_a_document_names_exist(path):
    text = path.read_text()
    links = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert not [target for target in links if not (path.parent / target).exists()]
    # Paths like `router/streams/stream.py`: a document that names a moved file misleads.
    tops = "|".join(top.name for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith("."))
    named = set(re.findall(rf"`((?:{tops})/[\w./-]+\.\w+)`", text))
    assert not sorted(target for target in named if not (ROOT / target).exists())


def test_license_and_version_are_said_in_one_way():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert 'license = "Apache-2.0"' in project
    version = re.search(r'^version = "(.+)"$', project, re.M)
    assert version is not None
    assert f"[{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"octavo:{version[1]}" in (ROOT / "docker-compose.yml").read_text()


def test_the_patterns_find_what_they_are_for():
    folder = "/" + "work/"
    assert MACHINE_PATHS.search(f"cd {folder}tree")
    assert MACHINE_PATHS.search(f'"{folder}x"')
    assert not MACHINE_PATHS.search("a/" + folder[1:])
    assert LONG_FILE_REASON.search("# Longer than 400 lines because a table of all cases is one subject.")
    assert not LONG_FILE_REASON.search("# Longer than 400 lines because.")


def test_make_test_runs_every_directory_of_tests():
    run = set(re.findall(r"\btests/(\w+)", (ROOT / "Makefile").read_text()))
    tests = ROOT / "tests"
    assert run == {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
