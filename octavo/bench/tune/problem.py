"""What is tuned, and what a try of it brings."""

from dataclasses import dataclass

from configs.load import ConfigError


class TuneError(ConfigError):
    """What stops a tuning run; the message names the option or file, the value seen and what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A linear layer: N outputs, K inputs; scales of 128 x 128 blocks, or of tokens and channels."""

    N: int
    K: int
    blockwise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The GPUs that share the work: all of one kind."""

    name: str
    num_gpus: int
    num_sms: int
    # Bytes that a program may have.
    shared_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One tile for one batch size."""

    # Median of one call; None if there is none.
    microseconds: float | None
    # Why there is none: the GPU has no room for the tile, or its results are wrong.
    error: str = ""
