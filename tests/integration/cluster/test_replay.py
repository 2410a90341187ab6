"""A recording of a scheduler process under real load replays to the same plans, however the process ended."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from configs.options import Options
from octavo.cli.main import app
from scheduler.core.state.running import Rows
from scheduler.recording.file import RecordingFile
from scheduler.recording.replay import Replay
from tests.support.repository import ROOT
from tests.support.scheduler.recordings import record
from tests.support.scheduler.scheduling import TIMEOUT, RouterEnd, make_options
from tests.support.up import COMMAND, environment

NUM_REQUESTS = 30


@contextlib.contextmanager
def process(module: str, options: Options, *flags: str) -> Iterator[subprocess.Popen[str]]:
    changed = options.model_dump(exclude_defaults=True)
    given = [f"--{name}={value}" for name, value in changed.items()]
    with subprocess.Popen(
        [sys.executable, "-m", module, *given, *flags],
        cwd=ROOT,
        env=environment(),
        text=True,
        stderr=subprocess.STDOUT,
        stdout=subprocess.DEVNULL,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "replay", *arguments], env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT
    )


async def run_load(options: Options) -> RouterEnd:
    """Runs requests of all kinds; some are cancelled, some have deadlines, and the worker is killed in mid-stream."""
    choose = Random(0)
    worker_flags = ("--step-seconds=0.002",)
    async with RouterEnd(options.scheduler_address(0)) as router:
        with process("tests.fakes.worker", options, *worker_flags) as first:
            groups: list[tuple[int, list[int]]] = []
            for index in range(NUM_REQUESTS):
                choices = list(range(choose.choice([1, 1, 3])))
                prompt = [20 + choose.randrange(2)] * choose.randint(1, 60)
                group = await router.submit(
                    prompt,
                    max_tokens=choose.randint(1, 60),
                    choices=choices,
                    seed=index,
                    ignore_eos=True,
                    deadline=0.3 if index % 7 == 0 else 0.0,
                    request_id=f"traced-{index}",
                )
                groups.append((group, choices))
            await router.wait_for(lambda: sum(map(len, router.tokens.values())) > 100)
            for group, _ in groups[3::9]:
                await router.cancel(group)
            first.kill()
        await router.wait_for(lambda: not router.loads[-1].workers_ready)
        with process("tests.fakes.worker", options, *worker_flags):
            for group, choices in groups:
                for choice in choices:
                    await router.finish(group, choice)
            await router.wait_idle()
    return router


def options_of(directory: Path, **changes: object) -> Options:
    return make_options(
        directory,
        trace=str(directory / "run.trace"),
        num_blocks_override=24,
        max_num_seqs=8,
        max_steps_in_flight=2,
        **changes,
    )


@pytest.mark.parametrize("target", [0, 5])
async def test_every_plan_of_a_scheduler_that_served_is_made_again(tmp_path: Path, target: float):
    """With a target of latency, plans depend on what steps really took."""
    options = options_of(tmp_path, inter_token_latency_target=target)
    with process("scheduler", options) as scheduler:
        await run_load(options)
        scheduler.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(scheduler.wait, TIMEOUT) == 0
    file = tmp_path / "run.0.trace"
    assert file.stat().st_mode & 0o777 == 0o600
    done = replay(str(file), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["equal"]
    assert outcome["num_requests"] == NUM_REQUESTS
    assert outcome["num_epochs_lost"] >= 1
    assert min(outcome["num_plans"], outcome["num_preemptions"]) > 0
    assert outcome["num_torn_bytes"] == 0
    with RecordingFile(file) as recorded:
        again = Replay(recorded)
        again.run(lambda num_bytes: None)
    assert bool(again.core.stats.num_limited_steps) == bool(target)
    explained = replay(str(file), "--explain=traced-1")
    assert explained.returncode == 0
    assert "every plan is equal" in explained.stdout
    for words in ("traced-1", "queued", "finished"):
        assert words in explained.stdout


async def test_a_scheduler_that_was_killed_leaves_a_trace_of_what_came_before(tmp_path: Path):
    options = options_of(tmp_path)
    file = tmp_path / "run.0.trace"
    with process("scheduler", options) as scheduler:
        await run_load(options)
        # Only records after the last flush are lost; each end of an epoch flushes.
        scheduler.kill()
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    done = replay(str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_REQUESTS} requests" in done.stdout
    assert "part of a truncated record" in done.stdout
    assert "every plan is equal" in done.stdout


def test_a_difference_is_drawn_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run.trace"
    record(file)
    monkeypatch.setattr(Rows, "take", lambda self: self._free.pop(0))
    done = CliRunner().invoke(app, ["replay", str(file)])
    assert done.exit_code == 1
    assert "step 1, 0.000000 s after the first call: new_rows[0].row differs" in done.output
    for line in ("in the trace  0", "replayed      3", "0.000000 s  submit group 1 (request-1): "):
        assert line in done.output
    assert "every plan is equal" not in done.output
    as_json = CliRunner().invoke(app, ["replay", str(file), "--json"])
    assert as_json.exit_code == 1
    outcome = json.loads(as_json.stdout)
    assert (outcome["equal"], outcome["difference"]["field"]) == (False, "new_rows[0].row")


@pytest.mark.parametrize("name", ["nowhere.trace", "README.md"])
def test_what_is_not_a_trace_is_a_message_and_not_a_traceback(name: str):
    done = replay(str(ROOT / name))
    assert done.returncode == 2
    assert done.stderr.startswith("octavo: ")
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_a_scheduler_that_cannot_write_its_trace_says_so_and_does_not_start(tmp_path: Path):
    options = make_options(tmp_path, trace=str(tmp_path / "nowhere" / "run.trace"))
    flags = [f"--{name}={value}" for name, value in options.model_dump(exclude_defaults=True).items()]
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", *flags],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 2
    assert "run.0.trace can't be written (No such file or directory): give a file" in done.stderr
