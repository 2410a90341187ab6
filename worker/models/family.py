"""The record by which a family of models is known: everything that depends on an architecture's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.model_config import ModelConfig
from worker.models.decoder import Decoder

if TYPE_CHECKING:
    from worker.weights.safetensors_source import SafetensorsFiles


def _open_safetensors(directory: Path) -> "SafetensorsFiles":
    # Benchmarks on a GPU compute a family's model where safetensors is not installed.
    from worker.weights.safetensors_source import SafetensorsFiles

    return SafetensorsFiles(directory)


def _as_it_is(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """How GGUF files hold a family's models."""

    # Their general.architecture.
    name: str
    # The one in config.json.
    architecture: str
    # Names of a layer's tensors, where they differ from those of the llama family.
    layer_names: Mapping[str, str] = field(default_factory=dict)
    # Rope turns pairs (2i, 2i + 1), and rows of q and k are in that order; else (i, i + head size / 2), as Hugging
    # Face has them.
    pairs_neighbours: bool = False
    # Adds to a config what the metadata says of this family alone. Its second argument gives a number of the metadata
    # by its name within the architecture, or a default.
    complete: Callable[[ModelConfig, Any], ModelConfig] = lambda config, get: config


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that one class computes, and one function reads the config.json of."""

    # As config.json names them.
    architectures: tuple[str, ...]
    model: type[Decoder]
    # Fields of a ModelConfig, from config.json and the number of layers: those that worker.models.config does not read,
    # and those that differ. Raises KeyError for a number that is missing, ValueError for what is not supported.
    fields: Callable[[Mapping[str, Any], int], dict[str, Any]]
    # The part of config.json that describes the text model.
    text_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is
    # The hidden_act that config.json may name; None: `fields` checks it.
    hidden_act: str | None = "silu"
    gguf: GgufFamily | None = None
    # Opens a directory's safetensors, with tensors as the model reads them.
    open_files: "Callable[[Path], SafetensorsFiles]" = _open_safetensors
