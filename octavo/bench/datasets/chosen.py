"""Makes the dataset that flags name."""

import math
from pathlib import Path

from octavo.bench.datasets.conversations import Conversations, CountTokens, estimated_tokens
from octavo.bench.datasets.request import Dataset, DatasetError
from octavo.bench.datasets.synthetic import RandomPrompts
from octavo.bench.datasets.timestamped import TimestampedTrace
from octavo.lab.flags import DatasetKind, LoadFlags
from octavo.plan.workload import parse_lengths

DEFAULT_LEN = "128"


_OF_FILES = (DatasetKind.SHAREGPT, DatasetKind.MOONCAKE, DatasetKind.TRACE)


def choose(query: LoadFlags, *, tokenizer: str = "") -> Dataset:
    """tokenizer: a directory with tokenizer.json, or a model; it counts the tokens of conversations. Raises
    DatasetError and PlanError, which name the flag."""
    for name in ("burstiness", "length_scale"):
        if not 0 < (value := getattr(query, name)) < math.inf:
            raise DatasetError(f"--{name.replace('_', '-')}={value:g} is not above 0")
    if (query.dataset_path is None) == (query.dataset in _OF_FILES):
        needs = "needs a file" if query.dataset_path is None else "takes no file"
        raise DatasetError(
            f"--dataset-path: --dataset {query.dataset} {needs}; the kinds with files are {', '.join(_OF_FILES)}"
        )
    if bool(query.prefix_len) != (query.dataset is DatasetKind.PREFIXES):
        raise DatasetError("--prefix-len and --dataset prefixes go together: give both or neither")
    if query.length_scale != 1 and query.dataset is not DatasetKind.MOONCAKE:
        raise DatasetError(f"--length-scale={query.length_scale:g} needs --dataset mooncake")
    if query.prompt_len and query.dataset in _OF_FILES:
        raise DatasetError(f"--prompt-len={query.prompt_len}: prompts are those of --dataset-path")
    if query.output_len and query.dataset in (DatasetKind.MOONCAKE, DatasetKind.TRACE):
        raise DatasetError(f"--output-len={query.output_len}: lengths are those of --dataset-path")
    prompt_len = parse_lengths(query.prompt_len or DEFAULT_LEN, "--prompt-len")
    output_len = parse_lengths(query.output_len or DEFAULT_LEN, "--output-len")
    path = query.dataset_path or Path()
    match query.dataset:
        case DatasetKind.RANDOM | DatasetKind.PREFIXES:
            return RandomPrompts(
                prompt_len=prompt_len,
                output_len=output_len,
                prefix_len=query.prefix_len,
                num_prefixes=query.num_prefixes,
            )
        case DatasetKind.SHAREGPT:
            if query.output_len and not query.output_len.isdecimal():
                raise DatasetError(f"--output-len={query.output_len!r}: with --dataset sharegpt give one number")
            return Conversations(
                path=path,
                output_len=int(query.output_len) if query.output_len else None,
                count_tokens=_counter(tokenizer),
            )
        case DatasetKind.MOONCAKE:
            return TimestampedTrace(path=path, length_scale=query.length_scale)
        case DatasetKind.TRACE:
            from octavo.bench.datasets.timestamped import RecordedTrace  # imports the scheduler's modules

            return RecordedTrace(paths=[path])


def _counter(tokenizer: str) -> CountTokens:
    if not tokenizer:
        return estimated_tokens
    from tokenizers import Tokenizer

    from runtime.model_files import resolve_model
    from runtime.tokenizer.files import TokenizerError, tokenizer_directory

    try:
        found = Path(tokenizer).expanduser()
        if not (found / "tokenizer.json").exists():
            found = tokenizer_directory(resolve_model(tokenizer))
        loaded = Tokenizer.from_file(str(found / "tokenizer.json"))
    except TokenizerError as error:
        raise DatasetError(f"--tokenizer={tokenizer}: {error}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
