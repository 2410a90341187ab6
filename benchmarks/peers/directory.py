"""The directories that the install scripts and prepare_models.py write to."""

import os
from pathlib import Path


def peer_directory(name: str) -> Path:
    """Default directory of a peer's install script, or of the model files that the peers share ("models")."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "octavo" / "peers" / name
