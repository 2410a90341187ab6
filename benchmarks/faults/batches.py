"""kill -9 under two batches of one input: `octavo run-batch` at one router, and /v1/batches at the other.

Routers, schedulers, workers and the command are killed in turn, single and in pairs, each time the batches have got on.
Afterwards both outputs must have each line of the input once, bad lines as errors, with equal texts; and no file that
had its final name may have been torn or short at any moment, as a reader sees it that looks all the time. Takes about
three minutes on two cores.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from benchmarks.faults.cluster import Cluster, Kind
from benchmarks.faults.command import FLAGS, NUM_ROUTERS, Plain, Say, add_arguments, plain, run_command
from benchmarks.faults.kills import choose_victims
from octavo.cluster.readiness import connectable
from tests.support.ports import free_ports
from tests.support.up import COMMAND, environment

CHAT = "/v1/chat/completions"
# One line in so many is bad, each in another way; with the outcome of such a line.
_BAD_OF = 10
_LOOK_S, _PATIENCE_S = 0.02, 600.0
_ENDED = ("completed", "failed", "expired", "cancelled")
# The command itself; None among the kinds to kill.
_VICTIMS: tuple[tuple[Kind | None, ...], ...] = (
    (Kind.ROUTER,),
    (Kind.SCHEDULER,),
    (Kind.WORKER,),
    (None,),
    (Kind.ROUTER, Kind.ROUTER),
    (None, Kind.ROUTER),
    (Kind.SCHEDULER, Kind.SCHEDULER),
    (Kind.WORKER, Kind.ROUTER),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    num_lines: int
    seconds: float
    kills: Sequence[str]
    # How often a final file was looked at.
    num_looks: int
    outcomes: dict[str, int]
    problems: Sequence[str]

    @property
    def is_clean(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class _Watch:
    """Looks at final files: each must be whole from its first moment on."""

    directory: Path
    num_lines: int
    num_looks: int = 0
    problems: list[str] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        output = self.directory / "out.jsonl"
        if output.exists():
            self._check(output, None)
        # What the router tells about; the input is one of them.
        for told in self.directory.glob("batches/*/files/*.json"):
            self._check(told.with_suffix(".data"), json.loads(told.read_bytes())["bytes"])

    def _check(self, path: Path, size: int | None) -> None:
        self.num_looks += 1
        content = path.read_bytes()
        *lines, rest = content.split(b"\n")
        if len(content) != size if size is not None else rest or len(lines) != self.num_lines:
            self.problems.append(f"{path.name} has {len(lines)} lines and {len(rest)} bytes of another one")


def make_lines(num_lines: int, num_tokens: int, seed: int) -> tuple[list[str], list[str]]:
    """Returns the lines of an input, and the outcome of each: a status, or the code of an error."""
    choose, lines, outcomes = random.Random(seed), list[str](), list[str]()
    for number in range(num_lines):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Tell me about the number {choose.randrange(1000)}."}],
            "max_tokens": choose.randint(num_tokens // 2, num_tokens),
            "seed": number,
            "temperature": choose.choice((0, 1)),
        }
        asked: dict[str, Any] = {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}
        outcome, text = "200", None
        match number // _BAD_OF % 6 if number % _BAD_OF == _BAD_OF - 1 else None:
            case 0:
                outcome, text = "invalid_json_line", '{"custom_id": "torn", "bo'
            case 1:
                del asked["custom_id"]
                outcome = "invalid_custom_id"
            case 2:
                asked["custom_id"] = "id-0"
                outcome = "duplicate_custom_id"
            case 3:
                asked["url"] = "/v1/embeddings"
                outcome = "invalid_url"
            case 4:
                body["temperature"] = -1
                outcome = "400"
            case 5:
                body["model"] = "nonesuch"
                outcome = "404"
        lines.append(text or json.dumps(asked))
        outcomes.append(outcome)
    return lines, outcomes


async def run_batches(
    cluster: Cluster, directory: Path, *, num_lines: int, num_kills: int, num_tokens: int, seed: int, say: Say
) -> Report:
    """Runs both batches to their ends, with kills. directory: of the cluster's batches_dir, `batches`."""
    lines, expected = make_lines(num_lines, num_tokens, seed)
    (directory / "in.jsonl").write_text("\n".join(lines))
    choose, began, kills = random.Random(seed), time.monotonic(), list[str]()
    options = cluster.options
    urls = [
        f"http://{connectable(options.host)}:{options.router_http_port(number)}"
        for number in range(options.num_routers)
    ]
    api = openai.AsyncOpenAI(base_url=f"{urls[-1]}/v1", api_key="none", max_retries=20)
    watch = _Watch(directory, num_lines)
    watching = asyncio.create_task(watch.run())
    command = await _start(directory, urls[0])
    async with asyncio.timeout(_PATIENCE_S), api:
        file = await api.files.create(file=directory / "in.jsonl", purpose="batch")
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        for number in range(num_kills):
            target = 2 * num_lines * (number + 1) // (num_kills + 1)
            while await asyncio.to_thread(_num_kept, directory) < target:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            kinds = _VICTIMS[number % len(_VICTIMS)]
            victims = choose_victims(cluster, [kind for kind in kinds if kind is not None], choose)
            names = [*map(str, victims)]
            if None in kinds and command.returncode is None:
                command.send_signal(signal.SIGKILL)
                await command.wait()
                command = await _start(directory, urls[0])
                names.append("the command")
            try:
                await asyncio.to_thread(cluster.kill, victims)
            except KeyError as error:
                # It is not back from the last kill.
                names.append(f"(not there: {error})")
            kills.append(" and ".join(names))
            say(f"killed {kills[-1]} at {target} of {2 * num_lines} lines")
        _, said = await command.communicate()
        while (batch := await api.batches.retrieve(batch.id)).status not in _ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        contents = [
            (await api.files.content(file_id)).text
            for file_id in (batch.output_file_id, batch.error_file_id)
            if file_id
        ]
    seconds = time.monotonic() - began
    await asyncio.to_thread(watch.look)
    watching.cancel()
    problems = watch.problems
    if command.returncode or batch.status != "completed":
        problems.append(f"the command ended with {command.returncode}: {said.decode()}; the batch is {batch.status}")
        return Report(
            num_lines=num_lines, seconds=seconds, kills=kills, num_looks=watch.num_looks, outcomes={}, problems=problems
        )
    outputs = [(directory / "out.jsonl").read_text(), "".join(contents)]
    found = [_by_number(text, name, problems) for text, name in zip(outputs, ("run-batch", "batches"), strict=True)]
    for number, outcome in enumerate(expected, 1):
        told = [_outcome(each.get(number)) for each in found]
        texts = [_text(each.get(number)) for each in found]
        if told != [outcome, outcome] or texts[0] != texts[1]:
            problems.append(f"line {number}: {told}, not {outcome}; {texts}")
    extra = [number for each in found for number in each if not 1 <= number <= num_lines]
    problems += [f"line {number} is not in the input" for number in extra]
    return Report(
        num_lines=num_lines,
        seconds=seconds,
        kills=kills,
        num_looks=watch.num_looks,
        outcomes=dict(Counter(_outcome(each) for output in found for each in output.values())),
        problems=problems,
    )


async def _start(directory: Path, url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        "run-batch",
        "-i",
        str(directory / "in.jsonl"),
        "-o",
        str(directory / "out.jsonl"),
        "--url",
        url,
        "--concurrency=16",
        env=environment(),
        stderr=asyncio.subprocess.PIPE,
    )


def _num_kept(directory: Path) -> int:
    """The lines that both batches have computed so far."""
    count = 0
    patterns = ("out.jsonl*", "batches/*/batches/*/*.part", "batches/*/files/*.data")
    for path in (path for pattern in patterns for path in directory.glob(pattern)):
        try:
            count += path.read_bytes().count(b'{"id":"batch_req_')
        except FileNotFoundError:
            # It has got its final name.
            continue
    return count


def _by_number(text: str, name: str, problems: list[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        written = json.loads(line)
        number = int(written["id"].rpartition("_")[2])
        if number in found:
            problems.append(f"{name}: line {number} is there twice")
        found[number] = written
    return found


def _outcome(written: dict[str, Any] | None) -> str:
    if written is None:
        return "missing"
    return str(written["response"]["status_code"] if written["response"] else written["error"]["code"])


def _text(written: dict[str, Any] | None) -> str | None:
    if _outcome(written) != "200":
        return None
    assert written is not None
    return written["response"]["body"]["choices"][0]["message"]["content"]


def summary(report: Report) -> str:
    """Formats the report for people."""
    lines = ["", f"{report.num_lines} lines twice in {report.seconds:.0f} s; {len(report.kills)} kills"]
    lines += [f"  {count:6}  {outcome}" for outcome, count in sorted(report.outcomes.items())]
    lines.append(f"final files were looked at {report.num_looks} times")
    lines += report.problems or ["each line is there once, with one outcome; no file was ever torn"]
    return "\n".join(lines)


def _as_json(report: Report) -> dict[str, object]:
    return {
        "clean": report.is_clean,
        "lines": report.num_lines,
        "seconds": round(report.seconds, 1),
        "kills": report.kills,
        "looks": report.num_looks,
        "outcomes": report.outcomes,
        "problems": report.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    add_arguments(parser, seed_of="lines and kills")
    arguments = parser.parse_args()
    directories: list[Path] = []

    def stand(directory: Path) -> AbstractContextManager[Plain]:
        directories.append(directory)
        return plain(
            directory, *FLAGS, f"--http-port={free_ports(NUM_ROUTERS)}", f"--batches-dir={directory / 'batches'}"
        )

    def run(site: Plain, seed: int, say: Say) -> Coroutine[Any, Any, Report]:
        return run_batches(
            site.cluster,
            directories[0],
            num_lines=arguments.lines,
            num_kills=arguments.kills,
            num_tokens=arguments.tokens,
            seed=seed,
            say=say,
        )

    return run_command(arguments, stand, run, as_json=_as_json, summary=summary)


if __name__ == "__main__":
    sys.exit(main())
