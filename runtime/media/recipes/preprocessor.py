"""Reads how a model's files say that images and videos become pixels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_preprocessor(directory: Path, kind: str) -> Mapping[str, Any]:
    """Returns the settings of a model's image processor or video processor. kind: "image" or "video".

    Newer versions of transformers write both into processor_config.json; older ones write preprocessor_config.json,
    and video_preprocessor_config.json for models whose videos differ. Empty if there is no file. Raises ValueError,
    naming the file, for invalid JSON.
    """
    files = {"image": (), "video": ("video_preprocessor_config.json",)}[kind]
    settings = _read(directory / "processor_config.json").get(f"{kind}_processor")
    if isinstance(settings, dict):
        return settings
    return next((each for name in (*files, "preprocessor_config.json") if (each := _read(directory / name))), {})


def check_steps(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if a step is switched off that recipes rely on."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if settings.get(name) is False:
            raise ValueError(f"{name}=False in preprocessor_config.json is not supported; True is")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return values
