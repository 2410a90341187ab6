"""The actor that runs one process of a cluster on a Ray node, called directly, with small stand-in processes."""

import asyncio
import importlib
import importlib.util
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from configs.options import Options
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import are_free
from octavo.cluster.processes import Stage
from octavo.ray import library
from octavo.ray.host import DIRECTORY, ProcessDirectory, ProcessHost, free_ports
from tests.support.up import FAKES

SETTINGS = {"max_restarts": 1, "metrics_host": "127.0.0.1", "health_port": 0, "hang_timeout": 20.0}
TIMEOUT = 60.0


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `python -m worker` start a stand-in."""
    monkeypatch.chdir(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(FAKES.parents[2]))


def _options() -> str:
    values = Options(max_num_seqs=7).model_copy(update={"runtime_dir": DIRECTORY, "curve_dir": f"{DIRECTORY}/keys"})
    return yaml.safe_dump(values.model_dump(mode="json"))


def _text(path: Path) -> str:
    return path.read_text()


async def _line(host: ProcessHost, words: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not any(kind == "line" and words in text for kind, text in await host.news()):
            pass


@pytest.mark.usefixtures("stand_ins")
async def test_a_process_gets_its_files_in_a_private_directory_and_ends_when_told_to() -> None:
    others = set(psutil.Process().children())
    host = ProcessHost("worker 0.0", Stage.WORKER)
    running = asyncio.create_task(host.run([], _options(), {"keys/worker.key_secret": "secret"}, **SETTINGS))
    await _line(host, "worker 0 max_num_seqs=7")
    (child,) = set(psutil.Process().children()) - others
    assert os.getpgid(child.pid) == child.pid, "signals for this process would reach it"
    config = Path(child.cmdline()[child.cmdline().index("-c") + 1])
    key = config.parent / "keys" / "worker.key_secret"
    assert _text(key) == "secret"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (config.parent, key.parent, key, config)]
    assert modes == [0o700, 0o700, 0o600, 0o600]
    assert yaml.safe_load(_text(config))["curve_dir"] == str(key.parent)
    await host.write("keys/worker.key_secret", "another")
    assert _text(key) == "another"
    await host.stop(5.0)
    assert await asyncio.wait_for(running, TIMEOUT) == ""
    await host.clean_up()
    assert not config.parent.exists()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("behaviour", "words"), [("permanent", "the weights are corrupt"), ("crash", "started again 1 times")]
)
async def test_what_ends_for_good_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_WORKER", behaviour)
    host = ProcessHost("worker 0.0", Stage.WORKER)
    cause = await asyncio.wait_for(host.run([], _options(), {}, **SETTINGS), TIMEOUT)
    assert words in cause
    await host.clean_up()


def test_what_an_actor_has_left_behind_is_removed_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray ends actors without notice; without this, keys would stay on the disk for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended, running = ProcessDirectory(), ProcessDirectory()
    (ended.path / "worker.key_secret").write_text("secret")
    os.close(ended._lock)  # as the end of its process does
    (tmp_path / "octavo-ray-of-nobody").mkdir()
    last = ProcessDirectory()
    assert {path.name for path in tmp_path.iterdir()} == {running.path.name, last.path.name, "octavo-ray-of-nobody"}
    for each in (running, last):
        each.remove()


def test_ports_come_in_a_row() -> None:
    first = free_ports("127.0.0.1", 3)
    assert are_free("127.0.0.1", first, 3)
    assert free_ports("127.0.0.1", 0) == 0


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ray(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", no_ray)
    with pytest.raises(ClusterError, match=r"No module named 'ray'.*pip install 'octavo\[ray\]'"):
        library.import_ray()
