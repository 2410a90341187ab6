"""The official JSON Schema test suite, as the source distribution of `jsonschema` has it."""

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = re.compile(r"[^/]+/json/tests/draft2020-12/((?:optional/format/)?[\w-]+)\.json")


@dataclass(frozen=True, slots=True)
class Case:
    keyword: str
    description: str
    schema: Any
    # Instances, whether they are valid, and what they show.
    tests: list[tuple[Any, bool, str]]

    @property
    def is_format(self) -> bool:
        """The tests assert formats, which draft 2020-12 otherwise only notes."""
        return self.keyword.startswith("optional/format/")


def download(version: str) -> bytes:
    """Returns the source distribution of a version, which pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", "jsonschema", "--no-deps"]
        subprocess.run([*command, "--dest", folder, f"jsonschema=={version}"], check=True)
        (path,) = Path(folder).glob("*.tar.gz")
        return path.read_bytes()


def cases(archive: bytes) -> Iterator[Case]:
    """Yields the groups of draft 2020-12, in the order of their names."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            found = _TESTS.fullmatch(member.name)
            file = files.extractfile(member) if found else None
            if found is None or file is None:
                continue
            for group in json.load(file):
                tests = [(test["data"], test["valid"], test["description"]) for test in group["tests"]]
                yield Case(found[1], group["description"], group["schema"], tests)
