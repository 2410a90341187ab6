"""Reads options from file, environment and flags, and reports plainly what is wrong with them."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from configs.options import Options
from configs.vllm_names import NAMES, refusal

ENV_PREFIX = "OCTAVO_"
# Environment variables of ours that are not options.
_ENV_RESERVED = {
    "OCTAVO_API_KEY",
    "OCTAVO_CONFIG",
    "OCTAVO_CACHE_DIR",
    "OCTAVO_PROGRESS_FD",
    "OCTAVO_TUNED_CONFIG_FOLDER",
}


class ConfigError(ValueError):
    """An option can't be used: the message names the option, its value, its source and what would work."""


def load_options(
    path: Path | None = None, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Options:
    """Reads the options of file, then environment, then flags; the later one wins.

    path: a YAML file; None: the file in OCTAVO_CONFIG, if any. flags: the flags given, by option name.
    Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get("OCTAVO_CONFIG"):
        path = Path(environ["OCTAVO_CONFIG"])
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, given in (
        (f"in {path}", _read_file(path) if path else {}),
        ("in the environment", _read_environment(environ)),
        ("as a flag", dict(flags or {})),
    ):
        for name, value in given.items():
            if name in NAMES:
                if reason := refusal(name, value):
                    raise ConfigError(f"{reason} (given {source})")
                continue
            if name not in Options.model_fields:
                raise ConfigError(f"unknown option {name!r} {source}{_suggest(name)}")
            values[name], origin[name] = value, source
    try:
        return Options(**values)  # type: ignore[arg-type]
    except ValidationError as error:
        # Leaves out defaults that failed only because an option that they follow from is wrong.
        causes = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
        raise ConfigError("; ".join(_describe(each, origin) for each in causes)) from None


def _read_file(path: Path) -> dict[str, object]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold `option: value` lines, not a {type(loaded).__name__}")
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name not in _ENV_RESERVED
    }


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, Options.model_fields, n=1)
    return f": did you mean {close[0]!r}?" if close else "; `octavo up --help` lists them all"


def _describe(error, origin: Mapping[str, str]) -> str:  # pydantic's ErrorDetails
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    option, *inner = map(str, error["loc"])
    return f"{'.'.join((option, *inner))}={error['input']!r} {origin.get(option, 'by default')}: {message}"
