"""Makes a vLLM of some 35 MiB for a machine with one Hopper GPU, torch 2.11 and no network: no weights, no server.

    python -m benchmarks.gpu.vllm.prepare [--folder .first_run/vllm] [--check PYTHON]

Downloads vLLM's wheel (250 MB), leaves out what Llama-3.1-8B on one H200 does not use, takes the code for other GPUs
out of its binaries (prune.py), and packs the rest beside the wheels that such a machine lacks. Prints each step's
sizes. Then benchmarks/gpu/vllm/measure.sh runs it there. --check: a Python 3.12 with torch 2.11 (its CUDA build, which
needs no GPU to be imported), which imports the engine, the model and the attention backend from what was packed.
"""

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.vllm.prune import is_for_head_size_128, prune

_VERSION = "0.25.0"
_ARCH = 90
# The device tool's limit for what travels, the repository's own files included.
_LIMIT_MIB = 64
# Parts that a Llama on one Hopper GPU does not use: an older FlashAttention; kernels for Blackwell, for MLA and for
# other quantizations; a server; tools.
_LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/vllm_flash_attn/cute/",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/deep_gemm/",
    "vllm/_flashmla",
    "vllm/_qutlass_C",
    "vllm/benchmarks/",
)
_BINARIES = ("vllm/_C_stable_libtorch", "vllm/_moe_C_stable_libtorch", "vllm/vllm_flash_attn/_vllm_fa3_C")
_PACKAGES = (
    "annotated-types",
    "blake3",
    "cachetools",
    "cbor2",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "diskcache==5.6.3",
    "fastapi<0.137,>=0.133",
    "ijson",
    "jsonschema",
    "jsonschema-specifications",
    "jiter",
    "lark==1.2.2",
    "llguidance<1.8,>=1.7",
    "msgspec",
    "openai<3",
    "openai-harmony",
    "partial-json-parser",
    "prometheus-fastapi-instrumentator",
    "pybase64",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "python-json-logger",
    "pyzmq",
    "referencing",
    "rpds-py",
    "setproctitle",
    "sniffio",
    "distro",
    "starlette",
    "typing-inspection",
    "apache-tvm-ffi>=0.1.10",
    "xgrammar==0.2.9",
)
_IMPORTS = """
import vllm
from vllm import LLM, SamplingParams
import vllm.v1.engine.llm_engine, vllm.v1.engine.core, vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu_model_runner
import vllm.model_executor.models.llama, vllm.v1.attention.backends.flash_attn
import vllm.model_executor.layers.quantization.fp8
from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, FA3_UNAVAILABLE_REASON
import torch, vllm._custom_ops
assert FA3_AVAILABLE, FA3_UNAVAILABLE_REASON
import vllm._C_stable_libtorch, vllm._moe_C_stable_libtorch
operations = [each for each in ("_C.cutlass_scaled_mm", "_C.rms_norm", "_C_cache_ops.reshape_and_cache_flash",
                                "_moe_C.topk_softmax", "_vllm_fa3_C.fwd")
              if not hasattr(getattr(torch.ops, each.partition(".")[0]), each.partition(".")[2])]
assert not operations, f"the binaries lack {operations}"
print("imported vLLM", vllm.__version__, "with torch", torch.__version__)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Packs vLLM for a machine with one Hopper GPU.")
    parser.add_argument("--folder", type=Path, default=Path(".first_run/vllm"), help="where it goes")
    parser.add_argument("--check", default="", metavar="PYTHON", help="imports what was packed with this Python")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with TemporaryDirectory() as directory:
        _download(Path(directory), f"vllm=={_VERSION}")
        (wheel,) = Path(directory).glob("vllm-*.whl")
        tree = Path(directory, "tree")
        _unpack(wheel, tree)
        for name in _BINARIES:
            _prune(next(tree.glob(f"{name}*.so")))
        # By xz, whose window is larger than a wheel's deflate.
        with tarfile.open(folder / "vllm.tar.xz", "w:xz", preset=6 | lzma.PRESET_DEFAULT) as archive:
            archive.add(tree, ".")
    _download(folder, *_PACKAGES)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    packed, wheels = sizes.pop("vllm.tar.xz") / 2**20, sum(sizes.values()) / 2**20
    print(f"vllm.tar.xz {packed:.1f} MiB, {len(sizes)} wheels {wheels:.1f} MiB: {packed + wheels:.1f} of {_LIMIT_MIB}")
    return check(folder, arguments.check) if arguments.check else 0


def _download(folder: Path, *packages: str) -> None:
    """Fetches wheels for CPython 3.12 on x86-64."""
    tags = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2014", "1")
    platforms = [f"--platform=manylinux{tag if tag.isdigit() else '_' + tag}_x86_64" for tag in tags]
    python = ("--only-binary=:all:", "--python-version=3.12", "--implementation=cp")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *python, *platforms, "-d", str(folder)]
    subprocess.run([*command, *packages], check=True)


def _unpack(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith(_LEFT_OUT)]
        archive.extractall(tree, names)
    left = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
    print(
        f"{wheel.name}: {wheel.stat().st_size / 2**20:.0f} MiB; unpacked, without what is left out: {left / 2**20:.0f}"
    )


def _prune(file: Path) -> None:
    data = bytearray(file.read_bytes())
    sizes = prune(data, _ARCH, is_for_head_size_128)
    file.write_bytes(data)
    parts = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(sizes.items()))
    print(f"{file.name}: {len(data) / 2**20:.0f} MiB, of which GPU code in MiB: {parts}")


def check(folder: Path, python: str) -> int:
    """Imports vLLM from the folder's files with another Python. Returns its exit code."""
    with TemporaryDirectory() as site:
        with tarfile.open(folder / "vllm.tar.xz") as archive:
            archive.extractall(site, filter="data")
        install = ("-q", "--no-index", "--no-deps", "--no-compile", "--target", site)
        subprocess.run([python, "-m", "pip", "install", *install, *map(str, folder.glob("*.whl"))], check=True)
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": site,
            "HOME": site,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LD_LIBRARY_PATH": str(_driver(Path(site))),
        }
        return subprocess.run([python, "-c", _IMPORTS], env=environment).returncode


def _driver(site: Path) -> Path:
    """A folder with a stand-in for the driver's library, which a machine without a GPU lacks and the binaries are
    linked with. Its functions fail when called, so that the binaries load but cannot compute."""
    names: set[str] = set()
    for file in site.rglob("vllm/**/*.so"):
        command = ["nm", "--dynamic", "--undefined-only", str(file)]
        names |= set(re.findall(r"\bcu[A-Z]\w+", subprocess.run(command, capture_output=True, text=True).stdout))
    folder = site / "driver"
    folder.mkdir()
    source = "\n".join(f"int {name}(void) {{ return 999; }}" for name in sorted(names))
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(folder / "libcuda.so.1"), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
