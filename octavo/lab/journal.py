"""The state of a run in a file: a line for each result, so that an interrupted run goes on where it stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.lab.errors import TuningError


class Journal:
    """Results by key. A key names all that its result depends on, but for what the whole run has in common."""

    def __init__(self, path: Path, common: Mapping[str, Any], *, advice: str) -> None:
        """common: what the run was begun with. advice: what to do about a file that does not fit. Raises TuningError
        if the file was begun with something else, or cannot be used."""
        self.path, self._advice = path, advice
        self.results: dict[str, dict[str, Any]] = {}
        common = json.loads(json.dumps(common))
        try:
            lines = _whole_lines(path)
            for number, line in enumerate(lines):
                self._take(number, line, common)
            self.num_kept = len(self.results)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise TuningError(f"cannot read and write {path}: {error.strerror}") from None
        if not lines:
            self._append(common)

    def put(self, key: str, result: dict[str, Any]) -> None:
        self.results[key] = result
        self._append({"key": key, "result": result})

    def close(self) -> None:
        self._file.close()

    def _take(self, number: int, line: str, common: Mapping[str, Any]) -> None:
        try:
            value = json.loads(line)
            if number:
                self.results[value["key"]] = dict(value["result"])
                return
            names = [name for name in {**value, **common} if value.get(name) != common.get(name)]
        except (ValueError, KeyError, TypeError) as error:
            found = f"{self.path}, line {number + 1}, is no result of such a run ({error!r})"
            raise TuningError(f"{found}: {self._advice}") from None
        if names:
            differing = ", ".join(f"{name}={value.get(name)!r} (now {common.get(name)!r})" for name in names)
            raise TuningError(f"{self.path} was begun with {differing}: {self._advice}")

    def _append(self, value: Mapping[str, Any]) -> None:
        # A finished measurement survives, however this process ends.
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


def _whole_lines(path: Path) -> list[str]:
    """The complete lines; a last one that a crash cut off is removed from the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    return whole.decode(errors="replace").splitlines()
