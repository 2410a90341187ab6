"""No secrets in logs, errors or metrics: keys, prompts, outputs, salts, contents of key files."""

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from prometheus_client import generate_latest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.api.gateway.app import Gateway
from router.compat.protos import kserve_pb2 as kserve
from router.compat.protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from runtime.telemetry.logs import configure_logging, flush_logs
from tests.fakes.hash_runner import BAD_TOKEN
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info, scripted
from tests.support.certificates import Authority
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler, running_worker

KEY, WRONG_KEY = "alice-9f86d081884c7d65", "mallory-d4735e3a265e16ee"
PROMPT, SALT = "Quarterly xylophone figures", "pepper-and-salt"
SPOKEN = "marmalade zeppelin"
SECRETS = (
    KEY,
    WRONG_KEY,
    "xylophone",
    "marmalade",
    "zeppelin",
    SALT,
    "PRIVATE KEY",
    "BEGIN CERTIFICATE",
    "271, 828",
    "271,828",
)


@pytest.fixture(name="said")
def _said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects texts from the test, then appends the whole log at debug level; none may contain a secret."""
    root, ours = logging.getLogger(), logging.getLogger("octavo")
    before = root.handlers[:], root.level, ours.level
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    configure_logging("test", "debug", "text")
    flush_logs()
    root.setLevel(logging.DEBUG)
    [writes] = root.handlers
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    handler.setFormatter(writes.formatter)
    root.handlers[:] = [handler]
    texts: list[str] = []
    try:
        yield texts
        texts.append(logged.getvalue())
    finally:
        root.handlers[:], root.level, ours.level = before
        logging.captureWarnings(False)
    everything = "\n".join(texts)
    assert "serves test-model" in everything or "is ready" in everything, "nothing was logged at all"
    for secret in SECRETS:
        assert secret not in everything


async def _failing(texts: list[str], call: object) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(call)
    texts.append(f"{caught.value.details()} {caught.value.trailing_metadata()}")


async def test_of_a_router(said: list[str], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.sign("router")
    keys = tmp_path / "keys"
    keys.write_text(f"keys: [{{name: alice, key: {KEY}}}]")
    keys.chmod(0o600)
    fake = FakeScheduler(
        socket_address(tmp_path, "one"),
        model=model_info(max_model_len=64),
        next_token=scripted(smollm2_tokenizer().encode(SPOKEN)),
    )
    options = {
        "api_keys_file": str(keys),
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "compat": ["kserve"],
        "enable_log_requests": True,
    }
    async with running_schedulers(fake), running_router([fake.address], **options) as (server, _):
        await server.wait_ready()
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        mine, none = (("authorization", f"Bearer {KEY}"),), (("x-api-key", WRONG_KEY),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials) as channel:
            stub = InferenceStub(channel)
            good = pb.GenerateRequest(prompt=PROMPT, cache_salt=SALT)
            assert (await receive(stub.Generate(good, metadata=mine))).text[0] == SPOKEN
            await _failing(said, stub.Generate(good, metadata=none))
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(content=PROMPT)])
            for bad in (
                pb.GenerateRequest(prompt=PROMPT * 500),
                pb.GenerateRequest(prompt=PROMPT, sampling=pb.SamplingParams(stop=[PROMPT * 100])),
                pb.GenerateRequest(prompt=PROMPT, cache_salt=SALT * 50),
                pb.GenerateRequest(prompt=PROMPT, sampling=pb.SamplingParams(n=99)),
                pb.GenerateRequest(chat=chat),
            ):
                await _failing(said, stub.Generate(bad, metadata=mine))
            infer = kserve.ModelInferRequest(model_name="test-model")
            tensor = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.extend([PROMPT.encode()] * 2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await GRPCInferenceServiceStub(channel).ModelInfer(infer, metadata=mine)
            said.append(caught.value.details() or "")
        await _over_http(server, said)
        said.append(generate_latest(server.metrics.registry).decode())


async def _over_http(server, said: list[str]) -> None:  # a RouterServer
    gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=10_000, keys=server.keys)
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        for key, body in (
            (WRONG_KEY, f'{{"prompt": "{PROMPT}"}}'),
            (KEY, f'{{"prompt": "{PROMPT}'),
            (KEY, f'{{"prompt": "{PROMPT}", "n": "{PROMPT}"}}'),
            (KEY, f'{{"prompt": [["{PROMPT}"]]}}'),
            (KEY, f'{{"messages": "{PROMPT}", "prompt": "{PROMPT}", "temperature": 99999}}'),
        ):
            answer = await http.post("/v1/completions", content=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code >= 400
            said.append(answer.text)


async def test_of_a_scheduler(said: list[str], tmp_path: Path) -> None:
    """A scheduler knows only token ids, which reveal as much as text, and the cache_salt that a router made."""
    options = make_options(tmp_path, log_level="debug")
    prompt = [337, 271, 828, 182, 845, 904]
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        await router.finish(await router.submit(prompt, max_tokens=4))
        await router.finish(await router.submit([*prompt, BAD_TOKEN], max_tokens=4))
        with contextlib.suppress(AssertionError):
            await router.finish(await router.submit([*prompt, 10**6], max_tokens=4))
        said.append(str(router.finishes) + str(router.rejected))
        said.append(generate_latest(server.step_loop.metrics.registry).decode())
