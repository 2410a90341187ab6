"""Many concurrent streams, followed token by token, and the verdict of each: a comparison with its undisturbed run."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from octavo import AsyncClient, SamplingParams
from octavo.client.errors import OctavoError
from octavo.client.requests import Prompt, RequestOptions
from octavo.client.results import Choice, Delta, Generation

_SUBJECTS = ("the number", "room", "the year", "bus line", "page", "the planet of star", "house", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A stream to ask for. number: its index among all. kind: for reports. is_unique: it must not be asked for again,
    since its request has an id."""

    number: int
    kind: str = "plain"
    prompt: Prompt
    sampling: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    is_unique: bool = False

    @property
    def num_tokens(self) -> int:
        """The most tokens that all choices together may have."""
        return self.sampling.n * (self.sampling.max_tokens or 0)

    @property
    def has_seed(self) -> bool:
        """True if the stream gives the same tokens each time."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    def seeded(self, seed: int) -> "Plan":
        return replace(self, sampling=replace(self.sampling, seed=seed))


def make_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    """Makes plans: every second one samples, half of these without a seed of the client's. mean_tokens: per choice."""
    choose = random.Random(f"{seed}/plans")
    return [_make_plan(number, choose, mean_tokens) for number in range(count)]


def _make_plan(number: int, choose: random.Random, mean_tokens: int) -> Plan:
    text = f"Tell me, in a few sentences, about {choose.choice(_SUBJECTS)} {choose.randrange(1000)}."
    prompt: Prompt = [{"role": "user", "content": text}]
    if number % 5 == 4:
        prompt = text
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=choose.randint(mean_tokens // 2, mean_tokens * 3 // 2),
        # Otherwise most streams would end early.
        ignore_eos=number % 8 != 6,
        stop=["\n\n", " 1"] if number % 15 == 4 else (),
        logprobs=2 if number % 12 in (0, 5) else None,
        prompt_logprobs=1 if number % 25 == 9 else None,
        repetition_penalty=1.1 if number % 9 == 8 else None,
        frequency_penalty=0.3 if number % 9 == 8 else 0.0,
    )
    if number % 2:
        sampling = replace(
            sampling,
            temperature=choose.choice([0.6, 0.8, 1.0]),
            top_p=choose.choice([0.9, 1.0]),
            top_k=choose.choice([0, 40]),
            seed=choose.randrange(2**32) if number % 4 == 1 else None,
            n=2 if number % 10 == 7 else 1,
        )
    return Plan(number=number, prompt=prompt, sampling=sampling)


@dataclass(slots=True, kw_only=True)
class Live:
    """A stream that runs."""

    plan: Plan
    began: float = 0.0
    request_id: str = ""
    num_tokens: int = 0
    # Arrivals of tokens: seconds since the crowd began, choice, number of the choice's tokens so far.
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The output of a stream, or why it failed. began, ended: seconds since the crowd began."""

    plan: Plan
    generation: Generation
    arrivals: list[tuple[float, int, int]]
    began: float = 0.0
    ended: float = 0.0
    error: OctavoError | None = None

    @property
    def reference(self) -> Plan:
        """The same stream, with the seed that it had."""
        return self.plan if self.plan.has_seed else self.plan.seeded(self.generation.seed)

    def arrival(self, choice: int, position: int) -> float | None:
        """Seconds from the crowd's beginning to the arrival of a token."""
        return next((at for at, index, held in self.arrivals if index == choice and held > position), None)


class Crowd:
    """Streams through several routers: each prefers one router, and goes on through the next when it loses that one."""

    def __init__(self, targets: Sequence[str], plans: Sequence[Plan], *, retry_for: float = 120.0) -> None:
        """retry_for: seconds without a message after which a stream fails."""
        self._plans = list(plans)
        self._next = itertools.chain(self._plans, itertools.cycle([plan for plan in plans if not plan.is_unique]))
        self._num_started = 0
        self._live: dict[int, Live] = {}
        self._tasks: list[asyncio.Task[Outcome]] = []
        self._clients = [
            AsyncClient([*targets[first:], *targets[:first]], retry_for=retry_for) for first in range(len(targets))
        ]
        # Monotonic seconds.
        self.began = time.monotonic()
        self._progress = asyncio.Event()
        self.num_received = 0
        # How often readers did what, for reports.
        self.counts = Counter[str]()

    async def __aenter__(self) -> "Crowd":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the crowd began."""
        return time.monotonic() - self.began

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def begun(self) -> list[str]:
        """The request ids of live streams that already have tokens."""
        return [stream.request_id for stream in self._live.values() if stream.num_tokens]

    @property
    def num_begun(self) -> int:
        return len(self.begun)

    @property
    def num_outstanding(self) -> int:
        """Tokens that live streams may still get."""
        return sum(stream.plan.num_tokens - stream.num_tokens for stream in self._live.values())

    def start(self, count: int) -> None:
        """Starts more streams: of each plan once, then of all again that may. No two of a plan are live at once."""
        for _ in range(count):
            turn = itertools.islice(self._next, len(self._plans))
            plan = next((plan for plan in turn if plan.number not in self._live), None)
            if plan is None:
                return
            self._num_started += 1
            self._live[plan.number] = Live(plan=plan, began=self.elapsed)
            self._tasks.append(asyncio.create_task(self._follow(plan), name=f"stream {plan.number}"))

    async def receive(self, num_tokens: int) -> None:
        """Waits for `num_tokens` more tokens, or until no stream is live."""
        wanted = self.num_received + num_tokens
        while self.num_received < wanted and self._live:
            self._progress.clear()
            await self._progress.wait()

    async def oldest_advance(self, count: int) -> None:
        """Waits until each of the oldest streams that are live now has another token, or has ended."""
        before = {number: self._live[number].num_tokens for number in itertools.islice(self._live, count)}
        while any(number in self._live and self._live[number].num_tokens == held for number, held in before.items()):
            self._progress.clear()
            await self._progress.wait()

    async def fewer_live(self, count: int) -> None:
        """Waits until fewer than `count` streams are live."""
        while self.num_live >= count:
            self._progress.clear()
            await self._progress.wait()

    async def finish(self) -> list[Outcome]:
        """Starts the plans that are left, and waits for all streams."""
        self.start(max(0, len(self._plans) - self._num_started))
        return await asyncio.gather(*self._tasks)

    async def _follow(self, plan: Plan) -> Outcome:
        live = self._live[plan.number]
        held: dict[int, int] = {}
        client = self._clients[plan.number % len(self._clients)]
        error = None
        async with client.stream(plan.prompt, plan.sampling, **plan.options) as stream:
            live.request_id = stream.request_id
            try:
                async for event in stream:
                    if isinstance(event, Delta):
                        held[event.index] = held.get(event.index, 0) + len(event.token_ids)
                        self.note(live, event.index, len(event.token_ids), held[event.index])
            # The other streams go on; the report names this one.
            except OctavoError as failure:
                error = failure
            return self._ended(plan, live, stream.generation, error)

    def note(self, live: Live, choice: int, num_tokens: int, held: int) -> None:
        """Notes the arrival of tokens. held: tokens of the choice with them."""
        live.num_tokens += num_tokens
        live.arrivals.append((self.elapsed, choice, held))
        self.num_received += num_tokens
        self._progress.set()

    def _ended(self, plan: Plan, live: Live, generation: Generation, error: OctavoError | None) -> Outcome:
        del self._live[plan.number]
        self._progress.set()
        return Outcome(
            plan=plan, began=live.began, ended=self.elapsed, generation=generation, arrivals=live.arrivals, error=error
        )


async def ask_all(targets: Sequence[str], plans: Sequence[Plan]) -> list[Outcome]:
    """Asks for the streams of these plans, undisturbed; returns their outcomes in this order."""
    async with Crowd(targets, [replace(plan, number=number) for number, plan in enumerate(plans)]) as crowd:
        return await crowd.finish()


def differences(disturbed: Outcome, undisturbed: Outcome) -> list[str]:
    """Compares everything that the client got, down to the bits of logprobs and the ids of calls. Returns a text for
    each difference."""
    for outcome, which in ((undisturbed, "undisturbed, "), (disturbed, "")):
        if outcome.error is not None:
            return [f"{which}it failed: {outcome.error!r}"]
    found: list[str] = []
    said, expected = disturbed.generation, undisturbed.generation
    for what in ("seed", "prompt_token_ids", "prompt_logprobs"):
        # Routers chose the seeds of greedy streams: they may differ.
        if what == "seed" and disturbed.plan.sampling.seed is None and disturbed.plan.has_seed:
            continue
        if getattr(said, what) != getattr(expected, what):
            found.append(f"another {what}")
    for got, wanted in zip(said.choices, expected.choices, strict=True):
        found += [f"choice {got.index}{what}" for what in _choice_differences(disturbed, got, wanted)]
    completion = said.usage and said.usage.completion_tokens
    if completion != sum(len(choice.token_ids) for choice in said.choices):
        found.append(f"its usage says {completion} completion tokens")
    return found


def _choice_differences(disturbed: Outcome, got: Choice, wanted: Choice) -> list[str]:
    if got.token_ids != wanted.token_ids:
        pairs = zip(got.token_ids, wanted.token_ids, strict=False)
        shorter = min(len(got.token_ids), len(wanted.token_ids))
        position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
        ours, theirs = (list(ids.token_ids[position : position + 4]) for ids in (got, wanted))
        at = disturbed.arrival(got.index, position)
        lengths = f"of {len(got.token_ids)} and {len(wanted.token_ids)} tokens"
        when = "" if at is None else f", at {at:.1f} s"
        return [f" from token {position}: {ours}, not {theirs}, {lengths}{when}"]
    fields = ("text", "logprobs", "finish_reason", "stop", "content", "reasoning", "tool_calls")
    return [f": another {what}" for what in fields if getattr(got, what) != getattr(wanted, what)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A stream, compared with its undisturbed run. Times are monotonic seconds, which all processes share. arrivals: of
    its tokens. lost: it failed or lacks tokens; duplicated: it has tokens too many. found: all differences, as text."""

    number: int
    is_sampled: bool
    began: float
    ended: float
    arrivals: list[float]
    is_lost: bool
    is_duplicated: bool
    found: list[str]

    def lived_at(self, begin: float, end: float) -> bool:
        """Returns whether the stream lived at any time between the two."""
        return self.began < end and self.ended > begin

    def longest_gap(self, begin: float, end: float) -> float:
        """Returns the longest time without a token that overlaps the given time."""
        pairs = itertools.pairwise([self.began, *self.arrivals, self.ended])
        return max((later - sooner for sooner, later in pairs if sooner < end and later > begin), default=0.0)


def judge(
    outcome: Outcome, expected: Outcome, began: float, compare: Callable[[Outcome, Outcome], list[str]] = differences
) -> Verdict:
    """Compares an outcome with the undisturbed one. began: the crowd, to which the outcome's times are relative."""
    pairs = list(zip(outcome.generation.choices, expected.generation.choices, strict=True))
    return Verdict(
        number=outcome.plan.number,
        is_sampled=outcome.plan.sampling.temperature != 0,
        began=began + outcome.began,
        ended=began + outcome.ended,
        arrivals=[began + at for at, _, _ in outcome.arrivals],
        is_lost=outcome.error is not None or any(len(got.token_ids) < len(want.token_ids) for got, want in pairs),
        is_duplicated=any(len(got.token_ids) > len(want.token_ids) for got, want in pairs),
        found=[*compare(outcome, expected), *(f"choice {got.index}: inexact" for got, _ in pairs if not got.exact)],
    )
