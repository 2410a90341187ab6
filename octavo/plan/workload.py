"""The requests of a simulation: arrival times, lengths, and shared prefixes."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.lab.errors import PlanError

NO_PREFIX = -1
_COLUMNS = ("arrival_s", "prompt_len", "output_len")
_OPTIONAL_COLUMN = "prefix_id"
# Far above what any replica takes, so that a typing error does not fill the memory.
_MAX_TOKENS = 16_777_216
# Token ids from here on belong to a single request; those below belong to a prefix.
_OWN_TOKENS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Columns with one entry per request, in order of arrival."""

    # Seconds from the start. All 0 in a closed loop.
    arrivals: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    # Requests with the same id begin with the same tokens. NO_PREFIX: the request shares nothing.
    prefix_ids: np.ndarray
    prefix_lens: np.ndarray
    # Most requests in flight: each end admits the next one. 0: no limit.
    concurrency: int = 0
    # The tokens of each prompt and output; None: they are made up, or not known.
    prompts: Sequence[Sequence[int]] | None = None
    outputs: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.arrivals)

    def prompt(self, index: int) -> tuple[int, ...]:
        """Token ids of a request. Those made up are equal to another request's exactly in the shared prefix."""
        if self.prompts is not None:
            return tuple(self.prompts[index])
        length, shared = int(self.prompt_lens[index]), int(self.prefix_lens[index])
        # Ids have no meaning here: one number per prefix, and one per request.
        return (int(self.prefix_ids[index]),) * shared + (_OWN_TOKENS + index,) * (length - shared)


Lengths = Callable[[np.random.Generator, int], np.ndarray]


def parse_lengths(text: str, option: str) -> Lengths:
    """Parses a distribution of lengths: N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA (sigma of the logarithm).

    Raises PlanError.
    """
    kind, *numbers = text.split(":")
    try:
        match kind, [float(number) for number in numbers]:
            case "uniform", [low, high] if 1 <= low <= high <= _MAX_TOKENS:
                return lambda random, count: random.integers(int(low), int(high) + 1, count)
            case "lognormal", [mean, sigma] if 1 <= mean <= _MAX_TOKENS and 0 <= sigma <= 10:
                # exp(mu + sigma^2 / 2) is the mean.
                mu = math.log(mean) - sigma**2 / 2
                return lambda random, count: np.clip(random.lognormal(mu, sigma, count).round(), 1, _MAX_TOKENS).astype(
                    np.int64
                )
            case "fixed", [length] if 1 <= length <= _MAX_TOKENS:
                return lambda random, count: np.full(count, int(length))
            case number, [] if 1 <= int(number) <= _MAX_TOKENS:
                return lambda random, count: np.full(count, int(number))
    except ValueError:
        pass
    raise PlanError(
        f"{option}={text!r}: give a number of tokens from 1 up, uniform:LOW:HIGH or lognormal:MEAN:SIGMA, "
        "such as 128, uniform:64:512 or lognormal:256:0.8"
    )


def synthesize(
    *,
    num_requests: int,
    rate: float,
    concurrency: int,
    prompt_len: Lengths,
    output_len: Lengths,
    max_model_len: int,
    shared_prefix: float = 0.0,
    num_prefixes: int = 1,
    seed: int = 0,
) -> Workload:
    """Draws requests at random.

    rate: requests per second of a Poisson process; inf: all at once. Random lengths are cut to max_model_len, prompts
    first; a constant length is not cut: the core refuses such requests if they are too long. shared_prefix: share of
    each prompt that all requests of the same prefix have in common. The num_prefixes prefixes are equally likely.
    """
    random = np.random.default_rng(seed)
    arrivals = np.zeros(num_requests)
    if math.isfinite(rate):
        arrivals = random.exponential(1.0 / rate, num_requests).cumsum()
    prompts = np.asarray(prompt_len(random, num_requests), np.int64)
    outputs = np.asarray(output_len(random, num_requests), np.int64)
    if len(np.unique(prompts)) > 1:
        prompts = np.minimum(prompts, max(1, max_model_len - 1))
    if len(np.unique(outputs)) > 1:
        outputs = np.minimum(outputs, np.maximum(1, max_model_len - prompts))
    prefix_ids = random.integers(0, num_prefixes, num_requests) if shared_prefix else np.full(num_requests, NO_PREFIX)
    return Workload(
        arrivals=arrivals,
        prompt_lens=prompts,
        output_lens=outputs,
        prefix_ids=prefix_ids,
        prefix_lens=(prompts * shared_prefix).astype(np.int64),
        concurrency=concurrency,
    )


def read_arrivals(path: Path, *, shared_prefix: float = 0.0) -> Workload:
    """Reads a CSV file with the columns arrival_s, prompt_len, output_len and, if prompts share prefixes, prefix_id.

    Requests of one prefix_id share the fraction `shared_prefix` of each prompt; 0: all but the last token of their
    shortest prompt. Raises PlanError that names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise PlanError(f"--arrivals: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"--arrivals: {path} is not a text file in UTF-8") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if header not in ([*_COLUMNS], [*_COLUMNS, _OPTIONAL_COLUMN]):
        raise PlanError(
            f"{path}, line 1: the columns are {','.join(header)!r}; give {','.join(_COLUMNS)}, "
            f"and {_OPTIONAL_COLUMN} if prompts share prefixes"
        )
    prefix_numbers: dict[str, int] = {}
    requests = [
        _read_row(row, len(header), f"{path}, line {number}", prefix_numbers)
        for number, row in enumerate(rows[1:], 2)
        if row
    ]
    if not requests:
        raise PlanError(f"{path} holds no request: give one line per request, {','.join(_COLUMNS)}")
    requests.sort(key=lambda request: request[0])
    arrivals, prompts, outputs, prefixes = (np.array(column) for column in zip(*requests, strict=True))
    return Workload(
        arrivals=arrivals,
        prompt_lens=prompts,
        output_lens=outputs,
        prefix_ids=prefixes,
        prefix_lens=_common_lens(prompts, prefixes, shared_prefix),
    )


def _read_row(
    row: list[str], num_columns: int, where: str, prefix_numbers: dict[str, int]
) -> tuple[float, int, int, int]:
    if len(row) != num_columns:
        raise PlanError(f"{where}: {len(row)} values, but the header names {num_columns} columns")
    try:
        arrival = float(row[0])
    except ValueError:
        arrival = math.nan
    if not (arrival >= 0 and math.isfinite(arrival)):
        raise PlanError(f"{where}: arrival_s={row[0]!r} is not a number of seconds from 0 up")
    lengths = []
    for name, text in zip(_COLUMNS[1:], row[1:3], strict=True):
        length = int(text) if text.strip().isdecimal() else 0
        if not 1 <= length <= _MAX_TOKENS:
            raise PlanError(f"{where}: {name}={text!r} is not a number of tokens from 1 to {_MAX_TOKENS:,}")
        lengths.append(length)
    name = row[3].strip() if num_columns == 4 else ""
    prefix = prefix_numbers.setdefault(name, len(prefix_numbers)) if name else NO_PREFIX
    return arrival, lengths[0], lengths[1], prefix


def _common_lens(prompts: np.ndarray, prefixes: np.ndarray, share: float) -> np.ndarray:
    lens = (prompts * share).astype(np.int64)
    if not share:
        for prefix in np.unique(prefixes):
            lens[prefixes == prefix] = prompts[prefixes == prefix].min() - 1
    lens[prefixes == NO_PREFIX] = 0
    return lens
