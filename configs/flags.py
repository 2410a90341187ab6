"""The flags of `python -m router`, `python -m scheduler` and `python -m worker`, made from the options' definitions."""

import difflib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.load import ConfigError
from configs.options import Options
from configs.vllm_names import NAMES, SWITCHES


def parse_flags(argv: Sequence[str], own: Sequence[str] = ()) -> tuple[Path | None, dict[str, object], dict[str, str]]:
    """Reads -c FILE (or --config), any option as --max-num-seqs 4, --max_num_seqs=4, --enable-x or --no-enable-x, and
    the program's own flags, named in `own` with underscores.

    Returns (configuration file, options given, own flags given). Values are text (bool for a switch without a value);
    load_options checks them with all others. Raises ConfigError, which names the flag.
    """
    config: Path | None = None
    flags: dict[str, object] = {}
    extras: dict[str, str] = {}
    rest = list(argv)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag in ("-c", "--config"):
            config = Path(_value(flag, value if equals else None, rest))
            continue
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} is not a flag; give options as --name value")
        name = flag[2:].replace("-", "_")
        switched_off = name.removeprefix("no_")
        if name in own:
            extras[name] = _value(flag, value if equals else None, rest)
        elif name in SWITCHES and not equals:
            flags[name] = True
        elif name in NAMES:
            flags[name] = _value(flag, value if equals else None, rest)
        elif name in Options.model_fields:
            if _is_switch(name) and not equals:
                flags[name] = True
            else:
                flags[name] = _value(flag, value if equals else None, rest)
        elif switched_off != name and switched_off in Options.model_fields and _is_switch(switched_off) and not equals:
            flags[switched_off] = False
        else:
            raise ConfigError(f"unknown flag {flag}{_suggest(name, own)}")
    return config, flags, extras


def usage(program: str, own: Mapping[str, str]) -> str:
    """The text of --help. own: the program's own flags, with underscores, and their help."""
    lines = [f"usage: {program} [-c FILE] [--option value ...]", ""]
    entries = {**own, **{name: field.description or "" for name, field in Options.model_fields.items()}}
    for name, help in entries.items():
        switch = name not in own and _is_switch(name)
        dashed = name.replace("_", "-")
        lines.append(f"  --{dashed}" + (f", --no-{dashed}" if switch else f" {name.upper()}"))
        lines += textwrap.wrap(help, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def own_number(extras: Mapping[str, str], name: str, default: int, below: int) -> int:
    """The value of an own flag that takes a number from 0 to below - 1. Raises ConfigError."""
    text = extras.get(name, str(default))
    if not (text.isdecimal() and int(text) < below):
        raise ConfigError(f"--{name.replace('_', '-')}={text!r}: give a number from 0 to {below - 1}")
    return int(text)


def _is_switch(name: str) -> bool:
    return Options.model_fields[name].annotation is bool


def _value(flag: str, given: str | None, rest: list[str]) -> str:
    if given is not None:
        return given
    if not rest:
        raise ConfigError(f"{flag} needs a value")
    return rest.pop(0)


def _suggest(name: str, own: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, [*own, *Options.model_fields, "config"], n=1)
    return f": did you mean --{close[0].replace('_', '-')}?" if close else "; --help lists them all"
