"""A trace goes from the caller's span through router and scheduler to the steps, also when a stream moves."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import use_span

from octavo import AsyncClient, SamplingParams
from octavo.client.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.api.gateway.app import Gateway
from runtime.telemetry import tracing
from runtime.telemetry.traceparent import is_sampled, trace_id_of
from runtime.telemetry.tracing import Tracing, TracingError
from tests.fakes.hash_runner import HashModel
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.otlp import running_collector
from tests.support.scheduler.scheduling import make_options, running_scheduler, running_worker

PROMPT = list(range(20, 120))
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_trace_goes_from_the_callers_span_to_the_steps(tmp_path: Path):
    with running_collector() as collector:
        options = make_options(tmp_path, otlp_traces_endpoint=collector.endpoint)
        routing: dict[str, Any] = {"otlp_traces_endpoint": collector.endpoint, "model_name": "hashes"}
        async with (
            running_scheduler(options) as scheduler,
            running_worker(options),
            running_router([scheduler.address], **routing) as (router, _),
            AsyncClient(f"127.0.0.1:{router.port}") as client,
        ):
            await router.wait_ready()
            with use_span(TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("caller")) as caller:
                result = await client.generate(PROMPT, SamplingParams(max_tokens=6, n=2), request_id="traced")
        for phase in ("queue", "prefill", "decode", "inference"):
            name = f"octavo_request_{phase}_time_seconds_count"
            assert scheduler.step_loop.metrics.shown.get_sample_value(name) == 1
        assert result.choices[0].token_ids == tuple(HashModel().generate(PROMPT, 6, seed=result.seed))

        request, residence = collector.one("octavo.request"), collector.one("octavo.residence")
        group, steps = collector.one("octavo.sequence-group"), collector.named("octavo.step")
        context = caller.get_span_context()
        everything = [
            request,
            residence,
            group,
            *steps,
            collector.one("octavo.tokenize"),
            collector.one("octavo.placement"),
        ]
        assert {span.trace for span in everything} == {f"{context.trace_id:032x}"}
        assert request.parent == f"{context.span_id:016x}"
        assert {span.parent for span in everything[-2:]} == {residence.parent} == {request.id}
        assert group.parent == residence.id
        # 100 prompt tokens at 64 per step, then the other choice.
        assert len(steps) >= 3
        assert {step.parent for step in steps} == {group.id}
        assert (request.process, group.process) == ("router-0", "scheduler-0")
        assert all(span.begin <= span.end for span in everything)
        assert request.begin <= residence.begin <= group.begin <= steps[0].begin
        assert steps[-1].end <= group.end <= request.end

        assert (
            request.attributes
            | {
                "gen_ai.request.id": "traced",
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": "hashes",
                "gen_ai.request.max_tokens": 6,
                "gen_ai.request.choice.count": 2,
                "gen_ai.usage.input_tokens": 100,
                "gen_ai.usage.output_tokens": 12,
                "gen_ai.response.finish_reasons": ["length", "length"],
                "octavo.outcome": "length",
            }
            == request.attributes
        )
        assert 0 < request.attributes["gen_ai.latency.time_to_first_token"] <= request.attributes["gen_ai.latency.e2e"]
        assert group.attributes["gen_ai.usage.output_tokens"] == 12
        assert group.attributes["gen_ai.latency.time_in_model_prefill"] > 0
        assert [group.events[0], group.events[-1]] == ["queued", "finished"]
        assert {"admitted", "chunked", "scheduled", "decoding"} <= set(group.events)
        assert (steps[0].attributes["octavo.step"], steps[0].attributes["octavo.tokens"]) == (1, 64)


async def test_a_stream_that_moves_has_another_residence_in_the_same_trace(tmp_path: Path):
    one = FakeScheduler(socket_address(tmp_path, "0"), pause_at=4)
    other = FakeScheduler(socket_address(tmp_path, "1"), pause_at=4)
    with running_collector() as collector:
        async with (
            running_schedulers(one, other),
            running_router([one.address, other.address], otlp_traces_endpoint=collector.endpoint) as (router, stub),
        ):
            await router.wait_ready()
            request = pb.GenerateRequest(
                request_id="moved", token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=9)
            )
            call = stub.Generate(request, metadata=(("traceparent", CALLER),))
            received = await receive(call, lambda received: len(received.token_ids.get(0, ())) == 4)
            first, second = (one, other) if one.submitted else (other, one)
            await second.resume_steps()
            await first.kill()
            await receive(call, into=received)
        assert len(received.token_ids[0]) == 9

        before, after = collector.named("octavo.residence")
        request = collector.one("octavo.request")
        assert request.parent == CALLER.split("-")[2]
        assert {before.trace, after.trace, request.trace} == {trace_id_of(CALLER)}
        assert {before.parent, after.parent} == {request.id}
        assert (before.links, after.links) == ([], [before.id])
        assert before.error
        assert not after.error
        assert before.end <= after.begin
        assert len(collector.named("octavo.placement")) == 2
        # Each scheduler gets the traceparent of its residence.
        for span, scheduler in ((before, first), (after, second)):
            assert scheduler.submitted[0].traceparent == f"00-{span.trace}-{span.id}-01"


async def test_over_http_the_trace_comes_in_a_header(tmp_path: Path):
    scheduler = FakeScheduler(socket_address(tmp_path, "0"))
    with running_collector() as collector:
        async with (
            running_schedulers(scheduler),
            running_router([scheduler.address], otlp_traces_endpoint=collector.endpoint) as (router, _),
        ):
            await router.wait_ready()
            gateway = Gateway(
                router.intake, router.registry, router.readiness, max_body_bytes=100_000, is_tracing=router.is_tracing
            )
            transport = httpx.ASGITransport(gateway.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                asked = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                answer = await http.post("/v1/chat/completions", json=asked, headers={"Traceparent": CALLER})
                assert answer.status_code == 200
        request = collector.one("octavo.request")
        assert (request.trace, request.parent) == (trace_id_of(CALLER), CALLER.split("-")[2])
        assert request.attributes["gen_ai.operation.name"] == "chat"


async def test_a_request_that_its_caller_does_not_sample_leaves_no_spans(tmp_path: Path):
    scheduler = FakeScheduler(socket_address(tmp_path, "0"))
    with running_collector() as collector:
        async with (
            running_schedulers(scheduler),
            running_router([scheduler.address], otlp_traces_endpoint=collector.endpoint) as (router, stub),
        ):
            await router.wait_ready()
            for request_id, traceparent in (("a", CALLER[:-1] + "0"), ("b", "nonsense")):
                request = pb.GenerateRequest(
                    request_id=request_id, token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=2)
                )
                await receive(stub.Generate(request, metadata=(("traceparent", traceparent),)))
        assert not scheduler.submitted[0].traceparent
        # An invalid traceparent counts as none: the router begins a trace.
        request = collector.one("octavo.request")
        assert (request.attributes["gen_ai.request.id"], request.parent) == ("b", "")


async def test_a_collector_that_is_away_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "_LAST_SPANS_S", 0.1)
    scheduler = FakeScheduler(socket_address(tmp_path, "0"))
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as (router, stub),
    ):
        await router.wait_ready()
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=2))
        assert len((await receive(stub.Generate(request))).token_ids[0]) == 2


async def test_each_request_has_a_line_in_the_log_by_option(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    scheduler = FakeScheduler(socket_address(tmp_path, "0"))
    caplog.set_level(logging.INFO, "octavo.router.requests")
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], enable_log_requests=True) as (router, stub),
    ):
        await router.wait_ready()
        sampling = pb.SamplingParams(max_tokens=3, temperature=0.5, stop=["secret"])
        await receive(stub.Generate(pb.GenerateRequest(request_id="good", prompt="private words", sampling=sampling)))
        bad = pb.GenerateRequest(request_id="bad", prompt="private words", model="another")
        with pytest.raises(Exception, match="another"):
            await receive(stub.Generate(bad))
        worse = pb.GenerateRequest(request_id="private" * 1000, prompt="private words")
        with pytest.raises(Exception, match="request_id"):
            await receive(stub.Generate(worse))
    good, refused, invalid = [vars(record) for record in caplog.records if record.name == "octavo.router.requests"]
    assert (good["request_id"], good["outcome"], good["output_tokens"]) == ("good", "length", 3)
    assert good["prompt_tokens"] > 0
    assert good["parameters"]["max_tokens"] == 3
    assert 0 < good["time_to_first_token_s"] <= good["latency_s"]
    assert (refused["request_id"], refused["outcome"]) == ("bad", "not_found")
    assert "another" in refused["error"]
    assert (len(invalid["request_id"]), invalid["outcome"], "error" in invalid) == (128, "invalid_argument", False)
    shown = json.dumps([good, refused], default=repr)
    assert "private" not in shown
    assert "secret" not in shown


async def test_a_bad_trace_header_is_refused_by_the_client():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="trace_headers"):
            client.stream(PROMPT, trace_headers={"Traceparent": "00-1-2-3"})


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://localhost/x", "http://"])
def test_an_endpoint_that_is_none_is_refused_with_what_would_work(endpoint: str):
    with pytest.raises(TracingError, match=r"otlp_traces_endpoint=.*grpc://HOST:4317"):
        Tracing.open(endpoint, "router-0")


def test_without_the_packages_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(TracingError, match=r"install octavo\[tracing\]"):
        Tracing.open("http://localhost:4318/v1/traces", "router-0")


@pytest.mark.parametrize(
    ("text", "trace", "sampled"),
    [
        (CALLER, CALLER[3:35], True),
        (CALLER[:-2] + "00", CALLER[3:35], False),
        (CALLER[:-2] + "03", CALLER[3:35], True),
        (CALLER.upper(), "", False),
        ("ff" + CALLER[2:], "", False),
        ("00-" + "0" * 32 + CALLER[35:], "", False),
        (CALLER[:36] + "0" * 16 + "-01", "", False),
        (CALLER + "\n", "", False),
        (CALLER * 1000, "", False),
        ("", "", False),
    ],
)
def test_what_is_no_traceparent_counts_as_none(text: str, trace: str, sampled: bool):
    assert (trace_id_of(text), is_sampled(text)) == (trace, sampled)
