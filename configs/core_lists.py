"""Lists of cores, as the option worker_cpus has them: "0-3,8", and one for each worker between bars: "0-15|16-31"."""

# A machine has fewer; a slip of the keyboard (0-70000000) should not take memory.
_MOST_CORES = 65_536


def parse_core_lists(text: str) -> list[list[int]]:
    """The cores of each list, in the order given. Raises ValueError, saying what is wrong."""
    lists = [_parse(part) for part in text.split("|")]
    cores = [core for each in lists for core in each]
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        raise ValueError(f"core {twice[0]} is named twice; each can compute for one thread")
    return lists


def _parse(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores; write 0-3,8, auto or none")
        low, high = int(first), int(last or first)
        if not low <= high < _MOST_CORES:
            raise ValueError(f"{part.strip()!r} is no range of cores: it runs upwards, below {_MOST_CORES}")
        cores += range(low, high + 1)
    return cores
