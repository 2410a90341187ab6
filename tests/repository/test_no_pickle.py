"""The sources never execute data as code: no pickle in any form, no eval, no YAML with objects.

Pickle on the sockets of an inference server has been remotely exploitable more than once (CVE-2025-32444,
CVE-2025-30165), so this test reads the sources instead of trusting a promise.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT, files, is_generated, name

MODULES = {"pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# The only part of `multiprocessing` that moves no objects.
MULTIPROCESSING_ALLOWED = {"shared_memory"}
NAMES = {
    # collectives of torch.distributed that pickle
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    # pyzmq
    "send_pyobj",
    "recv_pyobj",
    # concurrent.futures
    "ProcessPoolExecutor",
    # pandas, yaml
    "read_pickle",
    "to_pickle",
    "unsafe_load",
    "unsafe_load_all",
    "full_load",
    "full_load_all",
    "UnsafeLoader",
    "FullLoader",
}
QUALIFIED = {"torch.load", "torch.save", "torch.jit.load", "torch.serialization.load", "yaml.load", "yaml.load_all"}
BUILTINS = {"eval", "exec"}
# Keyword arguments whose only allowed value is False.
KEYWORDS = {"allow_pickle", "trust_remote_code"}
# Outside Python: scripts, C++ files and deployment files have no use for it either.
TEXT = re.compile(r"\b(cloudpickle|pickle|dill)\b|\btorch\.(load|save)\b")
TEXT_SUFFIXES = (".sh", ".cpp", ".cc", ".h", ".hpp", ".cu", ".toml", ".yaml", ".yml", ".proto")


def offences(source: str) -> list[str]:
    """The places in a Python source that can turn data into code, as "line N: what"."""
    return [f"line {line}: {what}" for line, what in _offences(ast.parse(source))]


def _offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if _forbidden(alias.name):
                        yield node.lineno, f"import {alias.name}"
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    if _forbidden(f"{module}.{alias.name}") or alias.name in NAMES:
                        yield node.lineno, f"from {module} import {alias.name}"
            case ast.Attribute(attr=attr) if attr in NAMES:
                yield node.lineno, attr
            case ast.Attribute() if _forbidden(dotted := _dotted(node, aliases)):
                yield node.lineno, dotted
            case ast.Call(func=ast.Name(id=function)) if function in BUILTINS:
                yield node.lineno, f"{function}(...)"
            case ast.Constant(value=str(text)) if text in MODULES:
                yield node.lineno, f"the module name {text!r} as a string"
            case ast.keyword(arg=str(arg), value=value) if arg in KEYWORDS and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                yield value.lineno, f"{arg} other than False"


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Maps the names that a module imports to what they stand for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`torch.load` for an attribute of a (possibly renamed) module; with a leading "?" for that of any other value."""
    match node:
        case ast.Name(id=name):
            return aliases.get(name, name)
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value, aliases)}.{attr}"
        case _:
            return "?"


def _forbidden(dotted: str) -> bool:
    if dotted in QUALIFIED:
        return True
    parts = dotted.removeprefix("torch.").split(".")
    if parts[0] == "multiprocessing":
        return not (len(parts) > 1 and parts[1] in MULTIPROCESSING_ALLOWED)
    return parts[0] in MODULES


def test_no_python_source_unpickles_or_evaluates():
    this_file = "tests/repository/test_no_pickle.py"
    found = [
        f"{name(path)} {offence}"
        for path in files(".py")
        if name(path) != this_file and not is_generated(path)
        for offence in offences(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_no_other_source_names_pickle():
    paths = [*files(*TEXT_SUFFIXES), *(path for path in (ROOT / "Makefile", ROOT / "Dockerfile") if path.exists())]
    found = [
        f"{name(path)} line {number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TEXT.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import os, cloudpickle as cp",
        "def f():\n    from dill import loads",
        "import shelve",
        "import torch\nstate = torch.load('weights.bin')",
        "import torch as t\nstate = t.load('weights.bin')",
        "from torch import jit\njit.load('model.pt')",
        "from torch import load",
        "import torch\ntorch.save({}, 'x')",
        "import torch.distributed as dist\ndist.all_gather_object(out, x)",
        "torch.distributed.broadcast_object_list(x)",
        "from torch.distributed import scatter_object_list",
        "import multiprocessing",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Listener",
        "import torch.multiprocessing as mp",
        "import torch\nq = torch.multiprocessing.Queue()",
        "from concurrent.futures import ProcessPoolExecutor",
        "socket.send_pyobj(x)",
        "x = socket.recv_pyobj()",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import yaml\nyaml.unsafe_load(text)",
        "from yaml import FullLoader",
        "eval('1')",
        "def f():\n    exec(code)",
        "import importlib\nimportlib.import_module('pickle')",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_planted_offences_are_found(planted: str):
    assert offences(planted), planted


@pytest.mark.parametrize(
    "harmless",
    [
        "import json\njson.load(file)",
        "model.eval()",
        "import yaml\nyaml.safe_load(text)",
        "from multiprocessing import shared_memory",
        "import queue\nqueue.Queue()",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "from safetensors.torch import load, save_file",
        "import safetensors.torch\nsafetensors.torch.load(data)",
        "'''No pickle here.'''",
    ],
)
def test_harmless_code_is_left_alone(harmless: str):
    assert not offences(harmless), harmless
