"""The benchmarks' peer engines: a runner behind its pipe, a stream over HTTP, and the evaluation of their figures."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.cpu_engine import Comparison
from benchmarks.engine.workload import SMOKE_SIZES, Figure
from benchmarks.peers import http_client
from benchmarks.peers.engine_process import EngineFailedError, EngineProcess
from benchmarks.peers.engines import EngineSpec, peer_engines
from benchmarks.peers.http_client import Api
from tests.support.repository import ROOT

# Writes to standard output, as C++ libraries do. Returns a token too few if the prompt begins with 1; dies if with 2.
RUNNER = """
import os
from engine_protocol import Outcome, serve

def run(work):
    os.write(1, b"a library speaks\\n")
    first = work.prompts[0][0]
    if first == 2:
        os._exit(3)
    return Outcome(len(work.prompts) * work.output - (first == 1), 0.25, {"shared": work.shared})

serve(lambda: ({"threads": 2}, run))
"""


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    script = tmp_path / "runner.py"
    script.write_text(RUNNER)
    return EngineSpec(
        engine="fake",
        form="F32",
        command=(sys.executable, str(script)),
        environment={"PYTHONPATH": str(ROOT / "benchmarks" / "peers" / "runners")},
        program=script,
        installed_by="nothing",
    )


@pytest.fixture
def log():
    with open(os.devnull, "wb") as file:
        yield file.fileno()


def test_what_libraries_print_does_not_come_between_answers(spec: EngineSpec, log: int):
    with EngineProcess(spec, log) as engine:
        assert engine.settings == {"threads": 2}
        answer = engine.run([[5, 6], [5, 7]], 4, shared=1)
        assert (answer.seconds, answer.extra) == (0.25, {"shared": 1})


def test_an_engine_that_did_less_than_it_was_asked_for_has_no_figure(spec: EngineSpec, log: int):
    with EngineProcess(spec, log) as engine, pytest.raises(EngineFailedError, match="gave 7 tokens, not 2 x 4"):
        engine.run([[1], [1]], 4)


def test_an_engine_that_dies_is_named_with_its_exit_code(spec: EngineSpec, log: int):
    with EngineProcess(spec, log) as engine, pytest.raises(EngineFailedError, match=r"fake:F32 ended with exit code 3"):
        engine.run([[2]], 4)


def test_an_engine_that_takes_too_long_is_ended(spec: EngineSpec, log: int):
    spec.program.write_text("import time; time.sleep(600)")
    with pytest.raises(EngineFailedError, match=r"fake:F32 took more than 0.3 s; --timeout allows more"):
        EngineProcess(spec, log, timeout=0.3).__enter__()


def test_a_form_that_does_not_suit_the_cpu_is_measured_if_it_is_named():
    names = [spec.name for spec in peer_engines("none", 2, ["vllm:bfloat16", "llama.cpp"])]
    assert names == ["vllm:bfloat16", "llama.cpp:BF16", "llama.cpp:F16"]


def test_a_peer_names_the_script_that_makes_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (openvino,) = peer_engines("int8", 2, ["openvino"])
    assert openvino.to_install == "benchmarks/peers/install_openvino.sh"
    openvino.program.parent.mkdir(parents=True)
    openvino.program.touch()
    assert openvino.to_install == "benchmarks/peers/install_llama_cpp.sh"
    assert openvino.model is not None
    openvino.model.parent.mkdir(parents=True)
    openvino.model.touch()
    assert openvino.to_install is None


class Floor:
    prompt_rate = 1000.0

    def output_rate(self, rows: int, prompt: int, output: int) -> float:
        return 100.0 * rows


def test_the_best_peer_is_the_fastest_in_rates_and_in_seconds():
    floor: Any = Floor()
    comparison = Comparison(quantization="int8", floor=floor, sizes=SMOKE_SIZES)

    def add(engine: str, rates: tuple[float, ...], seconds: float) -> None:
        comparison.add(engine, Figure(kind="throughput", concurrency=8, values=rates))
        comparison.add(engine, Figure(kind="shared_prefix", concurrency=16, values=(seconds,)))

    add("octavo:int8", (590.0, 600.0, 620.0), 1.0)
    add("a:Q8_0", (200.0,), 4.0)
    add("b:Q8_0", (300.0,), 8.0)
    add("octavo:int8", (600.0, 610.0, 650.0), 1.2)
    throughput, shared = comparison.rows()
    assert (throughput.best_peer, throughput.octavo, throughput.ratio) == ("b:Q8_0", 605.0, pytest.approx(605 / 300))
    assert throughput.share == pytest.approx(605 / 800)
    assert throughput.drift == pytest.approx(610 / 600)
    assert (shared.best_peer, shared.ratio, shared.share) == ("a:Q8_0", pytest.approx(4.0 / 1.1), None)


API = Api(
    path="/generate",
    body=lambda prompt, output: {"prompt": prompt, "output": output},
    tokens_after=lambda event, before: before + event["tokens"],
)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Streams a request's tokens two at a time, in HTTP chunks; a prompt that begins with 9 is refused."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    asked = json.loads(await reader.readexactly(length))
    if asked["prompt"][0] == 9:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nno nines\n")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(asked["output"] // 2):
            event = b'data: {"tokens": 2}\n\n'
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


async def test_tokens_of_streams_are_counted_and_refusals_and_short_streams_are_errors():
    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        whole, refused = await http_client.measure(port, API, [[5], [9]], 6, 1)
        (short,) = await http_client.measure(port, API, [[5]], 7, 1)
    assert (whole.error, whole.token_counts) == ("", [2, 2, 2])
    assert whole.began <= whole.token_times[0] <= whole.ended
    assert "400 Bad Request" in refused.error
    assert "no nines" in refused.error
    assert short.error == "6 output tokens came, not 7"
