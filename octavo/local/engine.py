"""Runs a scheduling core and a runner in one loop of one process: no router, no sockets, token ids only.

Images and videos are prepared beside the steps."""

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Unpack

from configs.options import Options
from octavo.client.errors import InvalidRequest
from protos import inference_pb2 as pb
from protos import step_pb2
from runtime.media.packed import PackedItem
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, Plan, SequenceEnd, SequenceKey, StepOutputs, WantedItem
from scheduler.ranks.group_requests import GroupFields, group_request
from scheduler.ranks.step_wire import StepCodec
from scheduler.settings import core_settings
from scheduler.step_costs import StepCostMeter
from worker.step.runner import PendingResult, PreparesItems, StepRunner


class ItemFlow:
    """Hands the runner the items that the core wants, and tells the core which are prepared."""

    def __init__(self, core: Core, runner: PreparesItems | None) -> None:
        """runner: None: the model takes no items."""
        self._core, self._runner = core, runner
        # By name, while a group needs them.
        self._files: dict[bytes, PackedItem] = {}
        self._num_needing: dict[bytes, int] = {}
        self._names: dict[int, Sequence[bytes]] = {}
        self._num_unanswered = 0
        self._answered = threading.Event()

    def add(self, group: int, files: Sequence[PackedItem]) -> None:
        """Holds the items of a group until `remove`. Raises InvalidRequest."""
        if not files:
            return
        if self._runner is None:
            raise InvalidRequest(f"the request has {len(files)} images or videos, and this model takes text only")
        self._names[group] = [each.name for each in files]
        for each in files:
            self._files.setdefault(each.name, each)
            self._num_needing[each.name] = self._num_needing.get(each.name, 0) + 1

    def remove(self, group: int) -> None:
        """Lets go of a group's items, if it has any."""
        for name in self._names.pop(group, ()):
            self._num_needing[name] -= 1
            if not self._num_needing[name]:
                del self._num_needing[name], self._files[name]

    @property
    def is_waiting(self) -> bool:
        """True while items are being prepared."""
        return self._num_unanswered > 0

    def wait(self) -> None:
        """Waits until an item is prepared, if any is under way."""
        if self._num_unanswered:
            self._answered.wait()

    def exchange(self, now: float) -> list[SequenceEnd]:
        """Takes the runner's answers, and hands over what the core wants now. Returns the ends of sequences whose items
        can't be prepared. Call it after `Core.submit` and `Core.schedule`."""
        runner = self._runner
        if runner is None:
            return []
        ends: list[SequenceEnd] = []
        self._answered.clear()
        for number, error in runner.take_done():
            self._num_unanswered -= 1
            if error:
                ends += self._core.item_failed(number, error, now)
            else:
                self._core.item_prepared(number)
        for wanted in self._core.take_wanted_items():
            self._prepare(runner, wanted, now)
        return ends

    def _prepare(self, runner: PreparesItems, wanted: WantedItem, now: float) -> None:
        if not self._core.wants_item(wanted.number):
            self._core.item_failed(wanted.number, "the requests that need it have ended", now)
            return
        data = b"".join(self._files[wanted.name].pieces)
        message = step_pb2.ItemToEncode(number=wanted.number, data=data, num_embeddings=wanted.num_embeddings)
        self._num_unanswered += 1
        runner.prepare(message, self._answered.set)


@dataclass(slots=True)
class StepTimes:
    """The time of all steps so far and its parts, in seconds. The parts lie within `total`, unless a GPU computes
    while steps are planned."""

    num_steps: int = 0
    total: float = 0.0
    # The core's decisions and bookkeeping, and the encoding and decoding of plans and results.
    scheduling: float = 0.0
    # Running the model, and choosing tokens. (On a GPU, `forward` includes both.)
    forward: float = 0.0
    sampling: float = 0.0


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """One step's output for one sequence: tokens, an end, or both. first_token: output position of the first token."""

    key: SequenceKey
    first_token: int = 0
    token_ids: Sequence[int] = ()
    # One per token, if the sequence asked for them.
    logprobs: Sequence[object] = ()
    end: SequenceEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The output of one step. Prompt logprobs come before output index 0 of their sequence."""

    # The plan that was computed. None: no step was, but sequences have ended, because their items can't be decoded.
    plan: Plan | None
    prompt_logprobs: Sequence[tuple[SequenceKey, pb.PromptLogprobs]]
    sequences: Sequence[SequenceOutput]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that has begun and whose result has not been taken."""

    plan: Plan
    pending: PendingResult
    # Time that beginning the step took; it is charged when the step's result is taken.
    seconds: float


class Engine:
    """Computes requests: `submit` them, then call `step` while it `has_work`. Not thread-safe."""

    def __init__(self, runner: StepRunner, options: Options) -> None:
        self.model = runner.model_info
        self.times = StepTimes()
        self._runner = runner
        settings = core_settings(
            options,
            self.model,
            runner.num_swap_blocks,
            holds_constrained=runner.holds_constrained,
            drafter=runner.drafter,
            encoder_cache_size=0 if runner.items is None else runner.items.cache_size,
        )
        self._core = Core(settings)
        self._items = ItemFlow(self._core, runner.items)
        self._codec = StepCodec(epoch=0)
        self._costs = StepCostMeter()
        # At most max_steps_in_flight.
        self._in_flight: deque[_Step] = deque()

    @property
    def has_work(self) -> bool:
        return self._core.has_work or bool(self._in_flight)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far: sequences that lost their KV blocks to others, to be resumed later."""
        return self._core.stats.num_preemptions

    @property
    def num_draft_tokens(self) -> tuple[int, int]:
        """Draft tokens verified so far, and those of them that were accepted."""
        return self._core.stats.num_draft_tokens, self._core.stats.num_accepted_tokens

    def submit(
        self,
        group: int,
        prompt_token_ids: Sequence[int],
        sampling: pb.SamplingParams,
        choices: Sequence[ChoiceStart] = (),
        *,
        items: Sequence[pb.ItemSpan] = (),
        files: Sequence[PackedItem] = (),
        **fields: Unpack[GroupFields],
    ) -> None:
        """Queues a request under a number that the caller chooses and has never used before.

        sampling: resolved, with every applicable field set (router.request.pipeline.resolve). choices: those that have
        not ended, with what each has already; empty: sampling.n new ones. items: images and videos among the prompt's
        tokens, and their files, which are held until the whole group is cancelled. fields: others of its
        GroupRequest. Raises InvalidRequest.
        """
        self._items.add(group, files)
        request = group_request(
            sampling,
            group=group,
            request_id=str(group),
            prompt_token_ids=tuple(prompt_token_ids),
            choices=choices or [ChoiceStart(choice=i) for i in range(sampling.n)],
            items=items,
            **fields,
        )
        if rejection := self._core.submit(request, time.monotonic()):
            self._items.remove(group)
            raise InvalidRequest(rejection.message)

    def cancel(self, group: int, choices: Collection[int] | None = None) -> list[SequenceEnd]:
        """Ends choices of a group (None: all), and returns the ends of those that were live. They give no further
        output."""
        if choices is None:
            self._items.remove(group)
        return self._core.cancel(group, choices, time.monotonic())

    def step(self) -> EngineOutput:
        """Begins as many steps as may be in flight, and waits for the first of them.

        Raises RuntimeError if requests are waiting that can never run.
        """
        start = time.perf_counter()
        failed = self._items.exchange(time.monotonic())
        seconds_begun = self._begin_steps()
        while not self._in_flight:
            failed += self._items.exchange(time.monotonic())
            if failed:
                ended = [SequenceOutput(key=end.key, end=end) for end in failed]
                return EngineOutput(plan=None, prompt_logprobs=(), sequences=ended)
            seconds_begun += self._begin_steps()
            if self._in_flight:
                break
            if not self._items.is_waiting:
                raise RuntimeError("requests are waiting, but none can run: the KV cache is too small for them")
            self._items.wait()
        step = self._in_flight.popleft()
        before_result = time.perf_counter()
        result = step.pending.result()
        computing = step.seconds + time.perf_counter() - before_result
        outcome = self._codec.decode(result)
        outputs = _by_sequence(self._core.apply(outcome.result, time.monotonic()))
        outputs += [SequenceOutput(key=end.key, end=end) for end in failed]
        total = time.perf_counter() - start - seconds_begun + step.seconds
        self._note_cost(step.plan, computing, total - computing, result)
        times = self.times
        times.num_steps += 1
        times.total += total
        times.scheduling += total - computing
        times.forward += result.timing.forward
        times.sampling += result.timing.sample
        return EngineOutput(plan=step.plan, prompt_logprobs=outcome.prompt_logprobs, sequences=outputs)

    def _begin_steps(self) -> float:
        """Begins as many steps as may be in flight. Returns the seconds that the runner took."""
        seconds = 0.0
        # Plans go through the wire format: so the measured time includes what a real scheduler does.
        while (plan := self._core.schedule(time.monotonic())) is not None:
            message = step_pb2.SchedulerToWorker.FromString(self._codec.encode(plan))
            planned = time.perf_counter()
            pending = self._runner.begin(message.plan)
            self._in_flight.append(_Step(plan, pending, time.perf_counter() - planned))
            seconds += self._in_flight[-1].seconds
        return seconds

    def _note_cost(self, plan: Plan, computing: float, scheduling: float, result: step_pb2.StepResult) -> None:
        if self._core.settings.speculation is None:
            return
        self._costs.note(plan, computing, result.timing.draft, num_drafted=len(result.drafts))
        self._costs.note_scheduling(scheduling, has_drafts=plan.has_drafts)
        if self._costs.may_have_news and (costs := self._costs.take()):
            self._core.set_costs(costs)


def _by_sequence(outputs: StepOutputs) -> list[SequenceOutput]:
    token_ids = outputs.token_ids.tolist()
    counts = [1] * len(outputs.groups) if outputs.num_tokens is None else outputs.num_tokens.tolist()
    keys = zip(outputs.groups.tolist(), outputs.choices.tolist(), strict=True)
    found: dict[SequenceKey, SequenceOutput] = {}
    start = 0
    for index, (key, first, count) in enumerate(zip(keys, outputs.first_tokens.tolist(), counts, strict=True)):
        found[key] = SequenceOutput(
            key=key,
            first_token=first,
            token_ids=token_ids[start : start + count],
            logprobs=outputs.logprobs.get(index, ()),
        )
        start += count
    for end in outputs.ends:
        found.setdefault(end.key, SequenceOutput(key=end.key)).end = end
    return list(found.values())


def build_engine(options: Options) -> Engine:
    """Loads the options' model into this process; it uses all cores unless worker_threads is smaller.

    Raises ValueError (missing model, damaged weights, options that ask for several workers) or
    worker.errors.PermanentError.
    """
    if options.world_size > 1:
        raise ValueError(
            f"tensor_parallel_size={options.tensor_parallel_size}, pipeline_parallel_size="
            f"{options.pipeline_parallel_size}: both must be 1 here, in one process; `octavo up` starts a worker for "
            f"each rank, and octavo.Client calls the cluster"
        )
    # These import torch, which takes seconds.
    from worker.cpu.threads import prepare_threads
    from worker.process.build import build_runner

    # A CPU computes on the thread that plans: one more step in flight would be in vain at each end.
    steps = {} if "max_steps_in_flight" in options.model_fields_set else {"max_steps_in_flight": 1}
    alone = options.model_copy(update={"data_parallel_size": 1, **steps})
    return Engine(build_runner(alone, cores=prepare_threads(alone)), alone)
