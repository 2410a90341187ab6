"""Lets compressed-tensors and bitsandbytes dequantize a checkpoint, in an environment of their own in the user's cache.

That environment runs this file as a program, `layout_oracle.py CHECKPOINT OUT`. It writes the floats of all quantized
weights to the safetensors file OUT, and imports nothing of Octavo.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# By quant_method.
LIBRARIES = {"compressed-tensors": "compressed-tensors==0.20.0", "bitsandbytes": "bitsandbytes==0.50.2"}
_PACKAGES = ("torch==2.13.0", "numpy", "safetensors", "packaging", *LIBRARIES.values())


def library_floats(checkpoint: Path, out: Path) -> dict:
    """Returns the floats of a checkpoint's quantized weights, by name; installs the libraries first if necessary."""
    from safetensors.torch import load_file

    from benchmarks.peers.directory import peer_directory

    directory = peer_directory("layout_oracle")
    python, installed = directory / "venv" / "bin" / "python", directory / "installed"
    if not installed.exists() or installed.read_text() != "\n".join(_PACKAGES):
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *_PACKAGES], check=True)
        installed.write_text("\n".join(_PACKAGES))
    subprocess.run([python, __file__, checkpoint, out], check=True, env={"PATH": "/usr/bin:/bin"})
    return load_file(out)


def _compressed_tensors(tensors: dict, config: dict) -> Callable:
    import torch
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import QuantizationScheme  # pyright: ignore[reportMissingImports]

    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(targets=group["targets"], weights={**group["weights"], "observer": None})
    compressor = BaseCompressor.get_value_from_registry(config["format"])

    def floats(layer: str) -> torch.Tensor:
        own = f"{layer}."
        data = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
        return compressor.decompress(data, scheme)["weight"]

    return floats


def _bitsandbytes(tensors: dict, config: dict) -> Callable:
    import torch
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    def floats(layer: str) -> torch.Tensor:
        name = f"{layer}.weight"
        if config.get("load_in_8bit"):
            return functional.int8_vectorwise_dequant(tensors[name], tensors[f"{layer}.SCB"])
        data = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        return functional.dequantize_4bit(tensors[name], functional.QuantState.from_dict(data, torch.device("cpu")))

    return floats


def _main(checkpoint: Path, out: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    prepare = {"compressed-tensors": _compressed_tensors, "bitsandbytes": _bitsandbytes}[config["quant_method"]]
    floats = prepare(tensors, config)
    layers = sorted({name.partition("_proj.")[0] + "_proj" for name in tensors if "_proj." in name})
    save_file({f"{layer}.weight": floats(layer).contiguous() for layer in layers}, out)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
