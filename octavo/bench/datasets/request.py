"""The interface of a dataset."""

from dataclasses import dataclass
from typing import Protocol

from configs.load import ConfigError
from octavo.bench.backends.base import Prompt


class DatasetError(ConfigError):
    """A dataset that can't be read, or can't be sent; the message names the file, the line and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    prompt: Prompt
    # Tokens of the prompt; of text, an estimate unless the dataset tells.
    prompt_len: int
    output_len: int
    # Seconds from the start at which it was sent when it was recorded; None: the source has no times.
    at: float | None = None


class Dataset(Protocol):
    @property
    def name(self) -> str:
        """The name for reports."""
        ...

    @property
    def is_drawn(self) -> bool:
        """True if another seed gives other prompts; False if they come from a file."""
        ...

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        """Returns `count` requests, or fewer if the source has no more.

        vocab_size: token ids are below. as_text: prompts have to be text. Raises DatasetError.
        """
        ...
