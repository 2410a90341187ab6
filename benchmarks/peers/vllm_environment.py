"""Where install_vllm.sh puts vLLM."""

import os
from pathlib import Path


def default_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "octavo" / "peers" / "vllm"
