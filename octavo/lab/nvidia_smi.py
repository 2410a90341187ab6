"""Asks NVIDIA's driver about this machine's GPUs."""

import shutil
import subprocess

_TIMEOUT_S = 20.0


class NvidiaSmiError(Exception):
    """nvidia-smi gives no answer; the message is its own."""


def nvidia_smi(*arguments: str) -> str | None:
    """Returns what it prints; None: there is no nvidia-smi. Raises NvidiaSmiError."""
    if (command := shutil.which("nvidia-smi")) is None:
        return None
    try:
        result = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NvidiaSmiError(str(error)) from None
    if result.returncode:
        output = result.stdout.strip() or result.stderr.strip() or f"exit code {result.returncode}"
        raise NvidiaSmiError(output.splitlines()[0])
    return result.stdout
