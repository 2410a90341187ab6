"""The state of a tuning run in a file: a line for each result, so that an interrupted run goes on where it stopped."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.tune.errors import TuningError


class Journal:
    """Results by key. A key names all that its result depends on, but for what the whole run has in common."""

    def __init__(self, path: Path, common: Mapping[str, Any]) -> None:
        """common: what the run was begun with. Raises TuningError if the file was begun with something else."""
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        lines = _whole_lines(path)
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
                if number:
                    self.results[value["key"]] = value["result"]
                elif value != json.loads(json.dumps(common)):
                    raise TuningError(f"{path} was begun with {_differing(value, common)}: {_ADVICE}")
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, TuningError):
                    raise
                raise TuningError(
                    f"{path}, line {number + 1}, is no state of octavo tune ({error!r}): {_ADVICE}"
                ) from None
        self.num_kept = len(self.results)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise TuningError(f"--output: cannot write {path}: {error.strerror}") from None
        if not lines:
            self._append(common)

    def get(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result under this key; computes and writes it if there is none."""
        if key not in self.results:
            self.put(key, compute())
        return self.results[key]

    def put(self, key: str, result: dict[str, Any]) -> None:
        self.results[key] = result
        self._append({"key": key, "result": result})

    def close(self) -> None:
        self._file.close()

    def _append(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


_ADVICE = "give the same flags to go on, another --output, or --restart to begin anew"


def _whole_lines(path: Path) -> list[str]:
    """The complete lines; a last one that a crash cut off is removed from the file. Raises TuningError."""
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            path.write_bytes(whole)
    except OSError as error:
        raise TuningError(f"--output: cannot read {path}: {error.strerror}") from None
    return whole.decode(errors="replace").splitlines()


def _differing(before: Any, now: Mapping[str, Any]) -> str:
    if not isinstance(before, dict):
        return "something else"
    names = [name for name in {**before, **now} if before.get(name) != json.loads(json.dumps(now.get(name)))]
    return ", ".join(f"{name}={before.get(name)!r} (now {now.get(name)!r})" for name in names)
