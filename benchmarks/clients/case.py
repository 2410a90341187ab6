"""The cluster that clients are tried against, and what they ask it."""

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.clients import task
from benchmarks.cluster.up import LOCAL, started
from benchmarks.peers.prepare_models import HUGGING_FACE, model_path, prepare
from octavo import Client, SamplingParams
from tests.support.ports import free_ports

NAME = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Answer briefly."
PROMPT = "The capital of France is"
MAX_TOKENS = 24
# Room for two calls.
MAX_CALL_TOKENS = 96
_TEMPLATE = Path(__file__).with_name("tools.jinja")
# Requests a minute of the key with which clients show their retries.
_SLOW_RATE = 10
_START_S = 120


@dataclass(frozen=True, kw_only=True)
class Case:
    """The programs' argument; benchmarks/clients/programs/report.py says what the fields are."""

    url: str
    key: str
    slow_key: str
    model: str
    directory: str
    question: str
    answer: str
    prompt: str
    continuation: str
    max_tokens: int
    max_call_tokens: int
    task: str
    scores: list[float]

    def json(self) -> str:
        return json.dumps(asdict(self))


@contextlib.contextmanager
def cluster() -> Iterator[Case]:
    """Serves the small model in float32 on this machine's CPU, with API keys and a chat template that shows tools.

    What clients should get is what Octavo's own client gets over gRPC.
    """
    prepare()
    port = free_ports(2)
    http_port = port + 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        directory = _with_tools(model_path(HUGGING_FACE), folder / "model")
        keys = folder / "keys.yaml"
        key, slow_key = secrets.token_hex(16), secrets.token_hex(16)
        with open(os.open(keys, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            slow = f"{{name: slow, key: {slow_key}, requests_per_minute: {_SLOW_RATE}}}"
            file.write(f"keys: [{{name: clients, key: {key}}}, {slow}]\n")
        flags = (
            *("-c", LOCAL, f"--model={directory}", f"--served-model-name={NAME}", "--dtype=float32"),
            *(f"--port={port}", f"--http-port={http_port}", f"--api-keys-file={keys}"),
        )
        with (folder / "cluster.log").open("w") as log, started(*flags, output=log.fileno()):
            with Client(f"127.0.0.1:{port}", api_key=key, retry_for=_START_S) as client:
                greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
                answer, continuation = client.chat(QUESTION, greedy).text, client.generate(PROMPT, greedy).text
            task.write(folder / "task", PROMPT, continuation, MAX_TOKENS)
            yield Case(
                url=f"http://127.0.0.1:{http_port}",
                key=key,
                slow_key=slow_key,
                model=NAME,
                directory=str(directory),
                question=QUESTION,
                answer=answer,
                prompt=PROMPT,
                continuation=continuation,
                max_tokens=MAX_TOKENS,
                max_call_tokens=MAX_CALL_TOKENS,
                task=str(folder / "task"),
                scores=list(task.scores(directory)),
            )


def _with_tools(model: Path, directory: Path) -> Path:
    """Makes a Hugging Face directory of the same model, whose chat template shows tools."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file)
    template = directory / "chat_template.jinja"
    template.unlink()
    template.write_bytes(_TEMPLATE.read_bytes())
    return directory
