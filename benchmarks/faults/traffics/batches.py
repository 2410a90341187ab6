"""Two batches of one input: `octavo run-batch` at one router, and /v1/batches at another one.

Faults come each time the batches have got on; now and then the command itself is killed and started again. Afterwards
both outputs must have each line of the input once, bad lines as errors, with equal texts; and no file that had its
final name may have been torn or short at any moment, as a reader sees it that looks all the time.
"""

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from benchmarks.faults.driver import Fault, Hit, Injection, Say, Traffic
from benchmarks.faults.ground import Ground
from tests.support.up import COMMAND, environment

CHAT = "/v1/chat/completions"
# One line in so many is bad, each in another way; with the outcome of such a line.
_BAD_OF = 10
# The command is killed before one fault in so many, the second one first.
_COMMAND_OF = 3
_LOOK_S, _PATIENCE_S = 0.02, 600.0
_ENDED = ("completed", "failed", "expired", "cancelled")


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
        # The files that the router lists; the input is one of them.
        for told in self.directory.glob("batches/*/files/*.json"):
            self._check(told.with_suffix(".data"), json.loads(told.read_bytes())["bytes"])

    def _check(self, path: Path, size: int | None) -> None:
        self.num_looks += 1
        content = path.read_bytes()
        *lines, rest = content.split(b"\n")
        if len(content) != size if size is not None else rest or len(lines) != self.num_lines:
            self.problems.append(f"{path.name} has {len(lines)} lines and {len(rest)} bytes of another one")


class Batches(Traffic):
    def __init__(
        self, ground: Ground, say: Say, *, num_lines: int, num_tokens: int, num_faults: int, seed: int
    ) -> None:
        super().__init__(ground, say)
        self._directory, self._num_lines, self._num_faults = ground.directory, num_lines, num_faults
        self._lines, self._outcomes = make_lines(num_lines, num_tokens, seed)
        self._url, self._other_url = (f"http://127.0.0.1:{ground.http_ports[router]}" for router in (0, -1))
        self._api = openai.AsyncOpenAI(base_url=f"{self._other_url}/v1", api_key="none", max_retries=20)
        self._watch = _Watch(ground.directory, num_lines)
        self._num_restarts = 0
        # Lines go on while processes are away.
        ground.is_patient = False

    async def begin(self) -> None:
        (self._directory / "in.jsonl").write_text("\n".join(self._lines))
        self._began = time.monotonic()
        file = await self._api.files.create(file=self._directory / "in.jsonl", purpose="batch")
        self._batch = await self._api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        await self._start()
        self._watching = asyncio.create_task(self._watch.run())

    async def is_ready(self, injection: Injection, choose: random.Random) -> bool:
        target = 2 * self._num_lines * (injection.number + 1) // (self._num_faults + 1)
        async with asyncio.timeout(_PATIENCE_S):
            while await asyncio.to_thread(_num_kept, self._directory) < target:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        if injection.number % _COMMAND_OF == 1 and self._command.returncode is None:
            self._command.send_signal(signal.SIGKILL)
            await self._command.wait()
            await self._start()
            self._num_restarts += 1
            self.say("the command is killed, and started again")
        return True

    async def go_on(self, fault: Fault, counts: Counter[str]) -> None:
        counts["lines"] = await asyncio.to_thread(_num_kept, self._directory)

    async def end(self, hits: Sequence[Hit]) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            _, said = await self._command.communicate()
            while (batch := await self._api.batches.retrieve(self._batch.id)).status not in _ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
            contents = [(await self._api.files.content(file_id)).text for file_id in ids]
        seconds = time.monotonic() - self._began
        await self.ground.wait_until_serving("the batches")
        await asyncio.to_thread(self._watch.look)
        self.problems, outcomes = self._watch.problems, Counter[str]()
        if self._command.returncode or batch.status != "completed":
            self.problems.append(
                f"the command ended with {self._command.returncode}: {said.decode()}; the batch is {batch.status}"
            )
        else:
            outcomes = self._compare((self._directory / "out.jsonl").read_text(), "".join(contents))
        self.figures = {
            "lines": self._num_lines,
            "seconds": round(seconds, 1),
            "looks": self._watch.num_looks,
            "commands_killed": self._num_restarts,
            "outcomes": outcomes,
        }
        self.tables = [
            f"{self._num_lines} lines twice in {seconds:.0f} s; the command was killed {self._num_restarts} times",
            *(f"  {count:6}  {outcome}" for outcome, count in sorted(outcomes.items())),
            f"final files were looked at {self._watch.num_looks} times",
        ]

    def _compare(self, *outputs: str) -> Counter[str]:
        """Compares both outputs with the input, and their texts with each other. Returns the outcomes of all lines."""
        names = ("run-batch", "batches")
        found = [_by_number(text, name, self.problems) for text, name in zip(outputs, names, strict=True)]
        for number, outcome in enumerate(self._outcomes, 1):
            told = [_outcome(each.get(number)) for each in found]
            texts = [_text(each.get(number)) for each in found]
            if told != [outcome, outcome] or texts[0] != texts[1]:
                self.problems.append(f"line {number}: {told}, not {outcome}; {texts}")
        extra = [number for each in found for number in each if not 1 <= number <= self._num_lines]
        self.problems += [f"line {number} is not in the input" for number in extra]
        return Counter(_outcome(each) for output in found for each in output.values())

    async def close(self) -> None:
        self._watching.cancel()
        if self._command.returncode is None:
            self._command.kill()
        await self._command.wait()
        await self._api.close()
        self.ground.is_patient = True

    async def _start(self) -> None:
        paths = (f"{self._directory / name}" for name in ("in.jsonl", "out.jsonl"))
        flags = [part for pair in zip(("-i", "-o"), paths, strict=True) for part in pair]
        self._command = await asyncio.create_subprocess_exec(
            *(*COMMAND, "run-batch", *flags, "--url", self._url, "--concurrency=16"),
            env=environment(),
            stderr=asyncio.subprocess.PIPE,
        )


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


def _num_kept(directory: Path) -> int:
    """The lines that both batches have computed so far."""
    count = 0
    patterns = ("out.jsonl*", "batches/*/batches/*/*.part", "batches/*/files/*.data")
    for path in (path for pattern in patterns for path in directory.glob(pattern)):
        try:
            count += path.read_bytes().count(b'{"id":"batch_req_')
        except FileNotFoundError:
            # It was renamed to its final name.
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
