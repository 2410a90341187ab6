"""Lets AutoAWQ, GPTQModel, compressed-tensors and bitsandbytes dequantize a checkpoint, in an environment of their own
in the user's cache.

That environment runs this file as a program, `oracle.py CHECKPOINT OUT`. It writes the floats of all quantized
weights to the safetensors file OUT, and imports nothing of Octavo.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PACKAGES = (
    "torch==2.13.0",
    "numpy",
    "safetensors",
    "packaging",
    "compressed-tensors==0.20.0",
    "bitsandbytes==0.50.2",
    # What the next two import.
    "accelerate",
    "datasets",
    "defuser",
    "device-smi",
    "logbar",
    "pillow",
    "protobuf",
    "pypcre",
    "requests",
    "threadpoolctl",
    "tokenicer",
    "torchao",
    "triton",
    "zstandard",
)
# GPTQModel asks for a newer PyTorch than it needs to dequantize.
_ALONE = ("gptqmodel==7.7.0", "autoawq==0.2.9")


def library_floats(checkpoint: Path, out: Path) -> dict:
    """Returns the floats of a checkpoint's quantized weights, by name; installs the libraries first if necessary."""
    from safetensors.torch import load_file

    from benchmarks.peers.directory import peer_directory

    directory = peer_directory("layout_oracle")
    python, installed = directory / "venv" / "bin" / "python", directory / "installed"
    packages = "\n".join((*_PACKAGES, *_ALONE))
    if not installed.exists() or installed.read_text() != packages:
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *_PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *_ALONE], check=True)
        installed.write_text(packages)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory)}
    done = subprocess.run([python, __file__, checkpoint, out], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkpoint}: no oracle: {done.stderr}")
    return load_file(out)


def _awq(tensors: dict, config: dict) -> Callable:
    import torch
    from awq.utils.packing_utils import dequantize_gemm  # pyright: ignore[reportMissingImports]

    def floats(layer: str) -> torch.Tensor:
        stored = (tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales"))
        return dequantize_gemm(*stored, config["bits"], config["group_size"]).t()

    return floats


def _gptq(tensors: dict, config: dict) -> Callable:
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # pyright: ignore[reportMissingImports]
    from gptqmodel.utils.model import (  # pyright: ignore[reportMissingImports]
        convert_gptq_v1_to_v2_format_module as to_v2,
    )

    settings = {key: config[key] for key in ("bits", "group_size", "sym", "desc_act")}

    def floats(layer: str) -> torch.Tensor:
        num_words, num_outputs = tensors[f"{layer}.qweight"].shape
        linear = TorchLinear(**settings, in_features=num_words * 32 // config["bits"], out_features=num_outputs)
        own = f"{layer}."
        data = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
        linear.load_state_dict({**linear.state_dict(), **data})
        if config["checkpoint_format"] == "gptq":
            to_v2(linear, config["bits"], torch.int32)
        return linear.eval().dequantize_weight().t()

    return floats


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


_LIBRARIES = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}


def _main(checkpoint: Path, out: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    floats = _LIBRARIES[config["quant_method"]](tensors, config)
    layers = sorted({name.partition("_proj.")[0] + "_proj" for name in tensors if "_proj." in name})
    save_file({f"{layer}.weight": floats(layer).contiguous() for layer in layers}, out)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
