"""Streams that outlive their connections (detach_timeout), half of them over gRPC, half over HTTP as events. Each is
read in parts: connections are cut after a few messages, and the next one goes to any router. A stream that no router
holds, because its router died, is resumed over gRPC, and asked for again over HTTP.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx

from benchmarks.faults.crowd import Crowd, Live, Outcome, Plan, differences, make_plans
from benchmarks.faults.means.relay import Relay
from benchmarks.faults.traffics.streams import StreamKind
from octavo.client.assembly import Assembly
from octavo.client.connection import open_async_channel
from octavo.client.errors import DeadlineExceeded, InvalidRequest, OctavoError, ProtocolError, from_rpc_error
from octavo.client.requests import generate_request
from octavo.client.results import Choice, Delta, FinishReason, Generation, Usage
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

# A connection lasts for fewer messages than this; the draw may be 0.
_MOST_MESSAGES = 24
# Seconds from a cut, or a failure, to the next try.
_LONGEST_PAUSE_S = 0.5
_PATIENCE_S = 120.0
# Statuses after which the same is tried again at any router: the connection broke, or its router did.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# No router holds it, or not any more what this client lacks.
_NOT_HELD = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
GRPC, EVENTS = "gRPC", "server-sent events"
# Longer than any stream is without a reader here.
DETACH_TIMEOUT_S = 120.0

# Fields of a request over HTTP that have the same names in SamplingParams.
_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "n",
    "ignore_eos",
    "stop",
    "repetition_penalty",
    "frequency_penalty",
)


def make_attached_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    """Makes plans as `make_plans`, half of them for each protocol, evenly over greedy and sampled ones.

    Those over HTTP have a seed: if its router dies, such a stream is asked for again.
    """
    plans = []
    for plan in make_plans(count, seed, mean_tokens=mean_tokens):
        if plan.number // 2 % 2:
            plans.append(replace(plan, kind=GRPC, is_unique=True))
            continue
        sampling = replace(plan.sampling, logprobs=None, prompt_logprobs=None)
        over_http = replace(plan, kind=EVENTS, sampling=sampling, is_unique=True)
        plans.append(over_http if over_http.has_seed else over_http.seeded(1000 + plan.number))
    return plans


def body_of(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a plan over HTTP."""
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "detach_timeout": DETACH_TIMEOUT_S,
    }
    for name in _FIELDS:
        if (value := getattr(plan.sampling, name)) not in (None, ()):
            body[name] = value
    if isinstance(plan.prompt, str):
        return "/v1/completions", body | {"prompt": plan.prompt}
    return "/v1/chat/completions", body | {"messages": plan.prompt}


class ChoiceOverHttp:
    """A choice, folded from server-sent events."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None

    def add(self, piece: dict[str, Any]) -> int:
        """Adds a piece of the choice; returns the number of its tokens."""
        self.text += piece.get("text") or piece.get("delta", {}).get("content") or ""
        token_ids = piece.get("token_ids") or []
        self.token_ids += token_ids
        if piece["finish_reason"]:
            self.finish_reason, self.stop = FinishReason(piece["finish_reason"]), piece["stop_reason"]
        return len(token_ids)

    def begins_as(self, other: "ChoiceOverHttp") -> bool:
        """Returns True if all that the other one holds is here, too."""
        return self.token_ids[: len(other.token_ids)] == other.token_ids and self.text.startswith(other.text)

    def result(self, index: int) -> Choice:
        return Choice(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop=self.stop,
            logprobs=(),
            exact=True,
        )


def attached_differences(disturbed: Outcome, undisturbed: Outcome) -> list[str]:
    """Compares all that a stream's protocol tells: over gRPC everything; over HTTP tokens, text, finish and usage."""
    if disturbed.plan.kind == EVENTS and undisturbed.error is None:
        choices = [replace(each, logprobs=()) for each in undisturbed.generation.choices]
        undisturbed = replace(
            undisturbed, generation=over_http(undisturbed.plan, choices, undisturbed.generation.usage)
        )
    return differences(disturbed, undisturbed)


def over_http(plan: Plan, choices: Iterable[Choice], usage: Usage | None) -> Generation:
    """The state of a stream over HTTP."""
    return Generation(
        request_id="",
        model="",
        seed=plan.sampling.seed or 0,
        prompt_token_ids=(),
        choices=tuple(choices),
        prompt_logprobs=(),
        usage=usage,
        fingerprint="",
        num_resumes=0,
    )


class AttachedCrowd(Crowd):
    """A crowd whose streams are read in parts, each through a connection of its own to any router."""

    def __init__(self, targets: Sequence[str], http_ports: Sequence[int], plans: Sequence[Plan], seed: int) -> None:
        super().__init__(targets, plans)
        self._all_targets = list(targets)
        self._http_targets = [f"127.0.0.1:{port}" for port in http_ports]
        self._choose = random.Random(f"{seed}/cuts")

    async def _follow(self, plan: Plan) -> Outcome:
        live = self._live[plan.number]
        live.request_id = f"attached-{plan.number}"
        reader = (_EventsReader if plan.kind == EVENTS else _GrpcReader)(self, plan, live)
        error = None
        try:
            await self._read(reader, live)
        # The other streams go on; the report names this one.
        except OctavoError as failure:
            error = failure
        return self._ended(plan, live, reader.generation, error)

    async def _read(self, reader: "_GrpcReader | _EventsReader", live: Live) -> None:
        """Reads a stream to its end. Raises OctavoError if that is not possible."""
        give_up_at = self.elapsed + _PATIENCE_S
        while True:
            before = live.num_tokens
            target = self._choose.choice(self._http_targets if isinstance(reader, _EventsReader) else self._all_targets)
            async with Relay.to(target) as relay:
                if await reader.read_part(relay, self._choose.randrange(_MOST_MESSAGES)):
                    return
            if live.num_tokens > before:
                give_up_at = self.elapsed + _PATIENCE_S
            elif self.elapsed > give_up_at:
                raise DeadlineExceeded(f"nothing new for {_PATIENCE_S:g} s")
            await asyncio.sleep(self._choose.uniform(0, _LONGEST_PAUSE_S))

    def cut(self, relay: Relay) -> None:
        self.counts["connections cut"] += 1
        relay.end()


class _GrpcReader:
    """Begins a stream with Generate, and goes on with Attach; with a Resume if no router holds it, because its router
    died."""

    def __init__(self, crowd: AttachedCrowd, plan: Plan, live: Live) -> None:
        self._crowd, self._live = crowd, live
        options = {**plan.options, "request_id": live.request_id, "detach_timeout": DETACH_TIMEOUT_S}
        self._assembly = Assembly(generate_request(plan.prompt, plan.sampling, options))  # type: ignore[arg-type]
        self._held: dict[int, int] = {}
        self._attaches = False

    @property
    def generation(self) -> Generation:
        return self._assembly.generation()

    async def read_part(self, relay: Relay, num_left: int) -> bool:
        """Makes a call, and reads until it ends or breaks. Returns True at the stream's end. Raises OctavoError.

        num_left: messages after which the connection is cut.
        """
        assembly = self._assembly
        async with open_async_channel(relay.address, None) as channel:
            stub = InferenceStub(channel)
            if self._attaches:
                call = stub.Attach(assembly.attach_call())
            else:
                self._crowd.counts["resumes over gRPC" if assembly.started else "requests over gRPC"] += 1
                call = stub.Generate(assembly.next_call())
            try:
                async for message in call:  # type: ignore[attr-defined]
                    self._take(message)
                    if num_left == 0:
                        self._crowd.cut(relay)
                    num_left -= 1
            except grpc.aio.AioRpcError as error:
                self._choose_next_call(error)
                return False
        self._count_attached()
        if not assembly.finished:
            raise ProtocolError("the stream ended before `finished`")
        return True

    def _take(self, message: pb.GenerateResponse) -> None:
        event = self._assembly.accept(message)
        if isinstance(event, Delta):
            held = self._held[event.index] = self._held.get(event.index, 0) + len(event.token_ids)
            self._crowd.note(self._live, event.index, len(event.token_ids), held)

    def _choose_next_call(self, error: grpc.aio.AioRpcError) -> None:
        """Raises OctavoError if there is none."""
        code = error.code()
        if self._attaches and code in _NOT_HELD:
            self._crowd.counts[f"attaching over gRPC: {code.name}"] += 1
            self._attaches = False
            return
        # An earlier call whose connection was cut has begun the stream.
        has_begun = not self._attaches and code is grpc.StatusCode.ALREADY_EXISTS
        if code not in _BROKEN and not has_begun:
            raise from_rpc_error(error)
        self._count_attached()
        self._attaches = has_begun or self._assembly.started

    def _count_attached(self) -> None:
        if self._attaches and self._assembly.is_answered:
            self._crowd.counts["attached over gRPC"] += 1


class _EventsReader:
    """Begins a stream with POST, and goes on with GET /v1/streams. If no router holds it, because its router died, asks
    for it again: its output must begin with what has come."""

    def __init__(self, crowd: AttachedCrowd, plan: Plan, live: Live) -> None:
        self._crowd, self._plan, self._live = crowd, plan, live
        self._choices = self._new_choices()
        # Those of the longest output before the stream was asked for again.
        self._earlier = self._choices
        self._usage: Usage | None = None
        # The number of the last event that has come.
        self._last_id = 0
        self._asks = True

    @property
    def generation(self) -> Generation:
        choices = (choice.result(index) for index, choice in enumerate(self._choices))
        return over_http(self._plan, choices, self._usage)

    async def read_part(self, relay: Relay, num_left: int) -> bool:
        """Makes a call, and reads until it ends or breaks. Returns True at the stream's end. Raises OctavoError.

        num_left: events after which the connection is cut.
        """
        asks, crowd = self._asks, self._crowd
        path, body = body_of(self._plan)
        async with httpx.AsyncClient(base_url=f"http://{relay.address}", timeout=_PATIENCE_S, trust_env=False) as http:
            if asks:
                crowd.counts["requests over HTTP" if not self._last_id else "asked again over HTTP"] += 1
                call = http.stream("POST", path, json=body, headers={"x-request-id": self._live.request_id})
            else:
                headers = {"last-event-id": str(self._last_id)}
                call = http.stream("GET", f"/v1/streams/{self._live.request_id}", headers=headers)
            try:
                async with call as response:
                    if not await self._accept(response, asks=asks):
                        return False
                    async for number, data in _events(response):
                        if data == "[DONE]":
                            self._check_against_earlier()
                            return True
                        if not self._take(number, json.loads(data)):
                            return False
                        if num_left == 0:
                            crowd.cut(relay)
                        num_left -= 1
            except httpx.TransportError:
                # The connection was cut, or its router died.
                pass
        return False

    async def _accept(self, response: httpx.Response, *, asks: bool) -> bool:
        """Returns True if events follow. Raises OctavoError for what must not be answered."""
        status, counts = response.status_code, self._crowd.counts
        if asks:
            # 409: an earlier call has begun it, and its connection was cut.
            self._asks = status not in (200, 409)
            if status == 200:
                self._begin_again()
        elif status == 200:
            counts["attached over HTTP"] += 1
        elif status == 404:
            counts["attaching over HTTP: 404"] += 1
            self._asks = True
        if status == 200:
            return True
        if status not in (404, 409, 503):
            raise InvalidRequest(f"HTTP status {status}: {(await response.aread())[:300]!r}")
        return False

    def _begin_again(self) -> None:
        if sum(len(each.token_ids) for each in self._choices) > sum(len(each.token_ids) for each in self._earlier):
            self._check_against_earlier()
            self._earlier = self._choices
        self._choices, self._last_id, self._live.num_tokens = self._new_choices(), 0, 0

    def _take(self, number: int | None, event: dict) -> bool:
        """Returns False for an event that is no part of the stream: its router stops."""
        if number is None:
            self._crowd.counts[f"told over HTTP: {event['error']['message'][:60]}"] += 1
            return False
        if number != self._last_id + 1:
            raise ProtocolError(f"event {number} follows event {self._last_id}")
        self._last_id = number
        if "error" in event:
            raise ProtocolError(f"the stream ended with {event['error']}")
        for piece in event["choices"]:
            index = piece["index"]
            if num_tokens := self._choices[index].add(piece):
                self._crowd.note(self._live, index, num_tokens, len(self._choices[index].token_ids))
        if usage := event.get("usage"):
            self._usage = Usage(
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                completion_tokens=usage["completion_tokens"],
            )
        return True

    def _check_against_earlier(self) -> None:
        for index, (choice, earlier) in enumerate(zip(self._choices, self._earlier, strict=True)):
            if not choice.begins_as(earlier):
                raise ProtocolError(f"choice {index}: asked for again, it does not begin with what had come before")

    def _new_choices(self) -> list[ChoiceOverHttp]:
        return [ChoiceOverHttp() for _ in range(self._plan.sampling.n)]


async def _events(response: httpx.Response) -> AsyncIterator[tuple[int | None, str]]:
    """Yields the ids and the data of events."""
    number: int | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            yield number, line.removeprefix("data: ")
            number = None


ATTACHED = StreamKind(
    make=lambda count, seed, tokens: make_attached_plans(count, seed, mean_tokens=tokens),
    crowd=lambda ground, plans, seed: AttachedCrowd(ground.cluster.targets, ground.http_ports, plans, seed),
    compare=attached_differences,
)
