"""What a tuning run has measured so far: a file beside the one it will write, a line of JSON for each try.

The first line says what the times were measured with; times of another GPU or version do not mix with them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.tiles.tuned_tile import Tile, TileError, tile_from_json
from octavo.bench.tune.problem import Measurement, TuneError

Measured = dict[int, dict[Tile, Measurement]]


class PartialResults:
    """Tries by batch size and tile, read from the file and appended to it. Close it to keep it, `remove` it when
    done."""

    def __init__(self, path: Path, measured_with: Mapping[str, str]) -> None:
        """Raises TuneError for a file that was begun with something else, or is none of ours."""
        self.path = path
        self.measured: Measured = {}
        lines = self._whole_lines()
        if lines:
            self._check_begun_with(lines[0], measured_with)
            for number, line in enumerate(lines[1:], 2):
                self._take(number, line)
        self._file = path.open("a")
        if not lines:
            self._append(measured_with)

    def add(self, M: int, tile: Tile, measurement: Measurement) -> None:
        self.measured.setdefault(M, {})[tile] = measurement
        self._append(
            {"M": M, "tile": tile.as_json(), "microseconds": measurement.microseconds, "error": measurement.error}
        )

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink()

    def _append(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        # Whatever ends this process, a line is there or is not.
        self._file.flush()

    def _whole_lines(self) -> list[str]:
        """The last line may have been cut off by what interrupted the run; it is removed."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            self.path.write_bytes(whole)
        return whole.decode(errors="replace").splitlines()

    def _check_begun_with(self, line: str, measured_with: Mapping[str, str]) -> None:
        begun_with = self._object(1, line)
        if begun_with != measured_with:
            raise TuneError(
                f"{self.path} was begun with {_shown(begun_with)}, this is {_shown(measured_with)}: go on with those, "
                "or remove the file to begin anew"
            )

    def _take(self, number: int, line: str) -> None:
        values = self._object(number, line)
        try:
            measurement = Measurement(microseconds=values["microseconds"], error=values["error"])
            self.measured.setdefault(values["M"], {})[tile_from_json(values["tile"])] = measurement
        except (KeyError, TileError) as error:
            raise self._unusable(number, repr(error)) from None

    def _object(self, number: int, line: str) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise self._unusable(number, str(error)) from None
        if not isinstance(values, dict):
            raise self._unusable(number, f"{values!r} is no object")
        return values

    def _unusable(self, number: int, why: str) -> TuneError:
        return TuneError(f"{self.path}, line {number}: {why}; remove the file to begin anew")


def _shown(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
