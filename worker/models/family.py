"""The record that describes a family of models: everything that depends on an architecture's name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernels.backend import Backend
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.decoder import Decoder
from worker.weights.reader import Shape, WeightReader

if TYPE_CHECKING:
    # Imported for their types alone: GPU benchmarks run models where pydantic and protobuf are not installed.
    from configs.groups.media import ProcessorOptions
    from runtime.media.recipes.recipe import Recipe
    from worker.encoders.encoder import Encoder
    from worker.weights.safetensors_files import SafetensorsFiles

# Makes a recipe from config.json, the model's directory, and a function that returns the token ids of a text. Raises
# ValueError.
MakeRecipe = Callable[[Mapping[str, Any], Path, Callable[[str], Sequence[int]]], "Recipe"]


# Two classes of encoders fit it: they are called to make one.
class MakeEncoder(Protocol):
    """A family's classes for images and videos."""

    def shapes(self, raw: Mapping[str, Any]) -> dict[str, Shape]:
        """Returns the shapes of the encoder's tensors, by the names that the model's files present. raw: config.json.
        Raises ValueError for unsupported values."""
        ...

    def __call__(
        self,
        raw: Mapping[str, Any],
        directory: Path,
        recipe: "Recipe",
        reader: WeightReader,
        backend: Backend,
        options: "ProcessorOptions",
    ) -> "Encoder": ...


def _open_safetensors(directory: Path) -> "SafetensorsFiles":
    # Imported here because GPU benchmarks run models where safetensors is not installed.
    from worker.weights.safetensors_files import SafetensorsFiles

    return SafetensorsFiles(directory)


def _as_it_is(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """How GGUF files store a family's models."""

    # The files' general.architecture.
    name: str
    # The architecture in config.json.
    architecture: str
    # Names of a layer's tensors, where they differ from those of the llama family. {} stands for an expert's number, in
    # a tensor that holds all experts. Several names: the layers in a tensor, q, k and v or two of equal size.
    layer_names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    # Rope rotates pairs (2i, 2i + 1), and rows of q and k are in that order; else (i, i + head size / 2), as in
    # Hugging Face's files.
    pairs_neighbours: bool = False
    # Rope may rotate a part of each head.
    has_partial_rope: bool = False
    # Adds to a config the metadata that only this family has. The second argument returns a metadata value by its name
    # within the architecture, or a default.
    complete: Callable[[ModelConfig, Any], ModelConfig] = lambda config, get: config


def experts_from_gguf(config: ModelConfig, get: Any, *, renormalize: bool) -> ExpertsConfig:
    """Reads the mixtures of GGUF metadata, which all layers have."""
    return ExpertsConfig(
        num_experts=int(get("expert_count")),
        num_experts_per_token=int(get("expert_used_count")),
        intermediate_size=int(get("expert_feed_forward_length", config.intermediate_size)),
        renormalize=renormalize,
        layers=(True,) * config.num_layers,
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share one model class and one reader of config.json."""

    # Names in config.json.
    architectures: tuple[str, ...]
    model: type[Decoder]
    # Makes fields of a ModelConfig from config.json and the number of layers: those that worker.models.config does not
    # read, and those that differ. Raises KeyError for a missing number, ValueError for an unsupported value.
    fields: Callable[[Mapping[str, Any], int], dict[str, Any]]
    # The part of config.json that describes the text model.
    text_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is
    # The hidden_act that config.json may name; None: `fields` checks it.
    hidden_act: str | None = "silu"
    gguf: GgufFamily | None = None
    # How images and videos become tokens and embeddings; None: the models take text only.
    recipe: MakeRecipe | None = None
    encoder: MakeEncoder | None = None
    # Opens a directory's safetensors files and presents tensors as the model reads them.
    open_files: "Callable[[Path], SafetensorsFiles]" = _open_safetensors
