"""Checks that foreign clients, each in an environment of its own, print the same text as Octavo's client.

    python -m benchmarks.cluster.foreign_clients                          all clients that this machine can run
    python -m benchmarks.cluster.foreign_clients --clients smg,triton     some: smg smg-sglang triton python node cpp go
    python -m benchmarks.cluster.foreign_clients --directory DIR          environments in DIR, not ~/.cache/octavo/peers

The clients call a local cluster; smg-sglang is smg before a router that is SGLang's engine to it. Environments are
made with venv, pip, npm and go, and kept for the next run; tests/integration/clients/test_foreign_clients.py uses those
of smg and tritonclient, and makes them if missing.
A client whose tools the machine lacks (npm, libgrpc++-dev, go) is left out. Prints a line for each client: what it
printed, or why it did not run. Exits with 1 if any text differs. The first run takes a minute or two.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.client import HTTPResponse
from pathlib import Path

from benchmarks.cluster.up import LOCAL, ROOT, started
from benchmarks.peers.directory import peer_directory
from benchmarks.peers.server_process import end
from octavo import Client, SamplingParams
from tests.support.ports import free_port

CLIENTS = ROOT / "docs" / "clients"
PROMPT, MAX_TOKENS = "The capital of France is", 16
_START_S, _INSTALL_S, _RUN_S = 120, 300, 60
# Clients that use another one's environment.
_ENVIRONMENTS = {"smg-sglang": "smg"}
_PACKAGES = {"smg": "smg>=1.13,<2", "triton": "tritonclient[grpc]>=2.73,<3", "python": "grpcio-tools>=1.85,<2"}

# Runs in tritonclient's own environment: its protobuf is not ours.
_TRITON = """
import json, queue, sys
import numpy as np
import tritonclient.grpc as triton

def tensor(name, value, datatype, dtype):
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=dtype))
    return made

address, prompt, max_tokens = sys.argv[1:]
parameters = json.dumps({"max_tokens": max_tokens, "temperature": "0"})
pieces = queue.Queue()
client = triton.InferenceServerClient(address)
assert client.is_server_ready()
client.start_stream(lambda result, error: pieces.put((result, error)))
client.async_stream_infer("", [
    tensor("text_input", prompt.encode(), "BYTES", object),
    tensor("stream", True, "BOOL", bool),
    tensor("sampling_parameters", parameters.encode(), "BYTES", object),
])
final = False
while not final:
    result, error = pieces.get(timeout=60)
    if error:
        raise error
    print(result.as_numpy("text_output")[0].decode(), end="")
    final = result.get_response().parameters["triton_final_response"].bool_param
client.stop_stream()
"""


class LackingError(Exception):
    """The machine lacks what a client needs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(_RUNS), help="comma-separated")
    parser.add_argument("--directory", type=Path, default=environments(), help="where environments are kept")
    arguments = parser.parse_args()
    chosen = arguments.clients.split(",")
    if unknown := set(chosen) - set(_RUNS):
        parser.error(f"--clients: {', '.join(sorted(unknown))}: there are {', '.join(_RUNS)}")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory.resolve()
        for compat, names in _by_compat(chosen).items():
            with _cluster(Path(temporary), compat) as address:
                expected, seeded = _expected(address)
                for name in names:
                    right = seeded if name in PROGRAMS else expected
                    outcome, is_right = _outcome(name, directory / _ENVIRONMENTS.get(name, name), address, right)
                    failed |= not is_right
                    print(f"{name:10} {outcome}", flush=True)
    return int(failed)


def environments() -> Path:
    """The default of --directory."""
    return peer_directory("clients")


def _outcome(name: str, directory: Path, address: str, expected: str) -> tuple[str, bool]:
    directory.mkdir(parents=True, exist_ok=True)
    try:
        text = _RUNS[name](directory, address)
    except LackingError as lacking:
        return f"left out: {lacking}", True
    except subprocess.CalledProcessError as error:
        return f"FAILED: {error}: {(error.stderr or error.stdout or '').strip()[-800:]}", False
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"FAILED: {error}", False
    return (f"ok {text!r}", True) if text == expected else (f"WRONG {text!r}, not {expected!r}", False)


def _expected(address: str) -> tuple[str, str]:
    """Returns the texts of Octavo's own client: greedy, and sampled with seed 0 as the programs of docs/clients do."""
    with Client(address) as client:
        greedy = client.generate(PROMPT, SamplingParams(max_tokens=MAX_TOKENS, temperature=0)).text
        return greedy, client.generate(PROMPT, SamplingParams(max_tokens=MAX_TOKENS, seed=0)).text


def _by_compat(names: Sequence[str]) -> dict[str, list[str]]:
    """Sorts clients by the services that their router must have: SMG takes the first engine that it finds."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault("sglang" if name == "smg-sglang" else "smg,kserve", []).append(name)
    return found


@contextlib.contextmanager
def _cluster(directory: Path, compat: str) -> Iterator[str]:
    """Serves the small model on this machine; yields the router's address. compat: the option."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        (directory / "cluster.log").open("w") as log,
        started("-c", LOCAL, f"--port={port}", f"--compat={compat}", output=log.fileno()),
    ):
        with Client(address, retry_for=_START_S) as client:
            client.model()
        yield address


def _run(*command: object, timeout: float = _RUN_S, **options: object) -> str:
    """Returns the command's stdout. Raises subprocess.SubprocessError."""
    done = subprocess.run(
        [str(part) for part in command],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,  # type: ignore[call-overload]
    )
    return done.stdout


def install(name: str, directory: Path) -> Path:
    """Returns bin/ of a client's virtual environment; makes the environment if there is none.

    Raises subprocess.SubprocessError.
    """
    folder = directory / "venv" / "bin"
    installed = directory / "installed"
    if not installed.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "venv", "--clear", directory / "venv")
        _run(folder / "python", "-m", "pip", "install", "--quiet", _PACKAGES[name], timeout=_INSTALL_S)
        installed.touch()
    return folder


def _needed(command: str, package: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise LackingError(f"{command} is not installed; install {package}")
    return found


def run_smg(directory: Path, address: str) -> str:
    """Returns the greedy text that the SMG gateway, before the router at `address`, streams to an OpenAI client.

    directory: holds the environment; it is made there if missing.
    """
    folder = install("smg", directory)
    port = free_port()
    command = [folder / "smg", "launch", "--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()]
    command += ["--worker-urls", f"grpc://{address}", "--policy", "round_robin"]
    with (directory / "smg.log").open("w") as log:
        gateway = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        with _when_served(f"{url}/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        text = ""
        with _when_served(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        return text
    finally:
        end(gateway)


def _when_served(request: urllib.request.Request | str) -> HTTPResponse:
    """Returns the answer once the gateway has workers and a tokenizer: until then it refuses or answers 503."""
    give_up = time.monotonic() + _RUN_S
    while True:
        try:
            return urllib.request.urlopen(request, timeout=_RUN_S)
        except OSError as error:
            if time.monotonic() > give_up:
                raise TimeoutError(f"the gateway does not serve within {_RUN_S} s: {error}") from error
        time.sleep(0.2)


def run_triton(directory: Path, address: str) -> str:
    """Returns the text that tritonclient streams from the router at `address`; otherwise like `run_smg`."""
    folder = install("triton", directory)
    return _run(folder / "python", "-c", _TRITON, address, PROMPT, MAX_TOKENS)


def _python(directory: Path) -> list[object]:
    folder = install("python", directory)
    return [folder / "python", CLIENTS / "python" / "from_proto.py"]


def _node(directory: Path) -> list[object]:
    node, npm = _needed("node", "Node 18 or newer"), _needed("npm", "npm")
    shutil.copy(CLIENTS / "node" / "package.json", directory)
    _run(npm, "install", "--no-audit", "--no-fund", cwd=directory, timeout=_INSTALL_S)
    # The program looks for its packages beside itself, and for the .proto three folders up.
    program = directory / "docs" / "clients" / "node" / "client.js"
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(CLIENTS / "node" / "client.js", program)
    shutil.copytree(ROOT / "protos", directory / "protos", dirs_exist_ok=True)
    return [node, program]


def _cpp(directory: Path) -> list[object]:
    for command in ("make", "g++", "protoc", "grpc_cpp_plugin", "pkg-config"):
        _needed(command, "g++, make, pkg-config, libgrpc++-dev, protobuf-compiler-grpc")
    _run("make", f"BUILD={directory}", cwd=CLIENTS / "cpp", timeout=_INSTALL_S)
    return [directory / "client"]


def _go(directory: Path) -> list[object]:
    _needed("go", "Go 1.19 or newer")
    _needed("protoc", "protobuf-compiler")
    build = CLIENTS / "go" / "build.sh"
    try:
        _run(build, directory, timeout=_INSTALL_S)
    except subprocess.CalledProcessError as error:
        if "dial tcp" not in error.stderr:
            raise
        # Modules cannot be fetched here.
        for command in ("protoc-gen-go", "protoc-gen-go-grpc"):
            _needed(command, f"{command}, golang-google-grpc-dev, golang-github-golang-protobuf-1-5-dev")
        _run(build, directory, timeout=_INSTALL_S, env={**os.environ, "GO111MODULE": "off"})
    return [directory / "client"]


# By language: a function that compiles the program of docs/clients in a folder, which it may find as it left it, and
# returns its command. Raises LackingError, subprocess.SubprocessError.
PROGRAMS: Mapping[str, Callable[[Path], list[object]]] = {"python": _python, "node": _node, "cpp": _cpp, "go": _go}


def _run_program(name: str, directory: Path, address: str) -> str:
    return _run(*PROGRAMS[name](directory), address, PROMPT, MAX_TOKENS, 0)


_RUNS: Mapping[str, Callable[[Path, str], str]] = {
    "smg": run_smg,
    "smg-sglang": run_smg,
    "triton": run_triton,
    **{name: partial(_run_program, name) for name in PROGRAMS},
}


if __name__ == "__main__":
    sys.exit(main())
