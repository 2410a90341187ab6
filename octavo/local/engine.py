"""A scheduling core and a runner in one process, driven in one loop: no router, no sockets, token ids only."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.options import Options
from octavo.client.errors import InvalidRequest
from protos import inference_pb2 as pb
from protos import step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, GroupRequest, Plan, SequenceEnd, SequenceKey, StepOutputs, StopRules
from scheduler.ranks.step_wire import GroupSampling, StepCodec
from scheduler.settings import core_settings
from worker.step.runner import PendingResult, StepRunner


@dataclass(slots=True)
class StepTimes:
    """Where the time of all steps so far went, in seconds. The other parts lie within `total`, unless a GPU computes
    while steps are planned."""

    num_steps: int = 0
    total: float = 0.0
    # The core's decisions and bookkeeping, and the plan's and the result's way over the wire format.
    scheduling: float = 0.0
    # The model, and choosing tokens. (On a GPU, `forward` is both.)
    forward: float = 0.0
    sampling: float = 0.0


@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """What one step gave one sequence: tokens, the first of them at output position first_token, an end, or both."""

    key: SequenceKey
    first_token: int = 0
    token_ids: Sequence[int] = ()
    # One a token, if the sequence asked for them.
    logprobs: Sequence[object] = ()
    end: SequenceEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step gave. Prompt logprobs come before output index 0 of their sequence."""

    # That was computed.
    plan: Plan
    prompt_logprobs: Sequence[tuple[SequenceKey, pb.PromptLogprobs]]
    sequences: Sequence[SequenceOutput]


@dataclass(frozen=True, slots=True)
class _Step:
    """One that was begun and whose result has not been taken."""

    plan: Plan
    pending: PendingResult
    # That beginning it took. A step that is computed meanwhile is charged when its turn comes.
    seconds: float


class Engine:
    """Submit requests, then call `step` while it `has_work`. Not for several threads."""

    def __init__(self, runner: StepRunner, options: Options) -> None:
        self.model = runner.model_info
        self.times = StepTimes()
        self._runner = runner
        self._core = Core(core_settings(options, self.model, runner.num_swap_blocks))
        self._codec = StepCodec(epoch=0)
        # max_steps_in_flight at most.
        self._in_flight: deque[_Step] = deque()

    @property
    def has_work(self) -> bool:
        return self._core.has_work or bool(self._in_flight)

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their KV blocks to others so far, and came or will come back."""
        return self._core.stats.num_preemptions

    def submit(self, group: int, prompt_token_ids: Sequence[int], sampling: pb.SamplingParams) -> None:
        """Queues a request under a number of the caller's, never used before.

        sampling: resolved, with every field set that applies (router.intake.validation.resolve_sampling).
        Raises InvalidRequest.
        """
        request = GroupRequest(
            group=group,
            request_id=str(group),
            prompt_token_ids=tuple(prompt_token_ids),
            choices=tuple(ChoiceStart(choice=i) for i in range(sampling.n)),
            stop=StopRules(
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                stop_token_ids=frozenset(sampling.stop_token_ids),
                ignore_eos=sampling.ignore_eos,
            ),
            sampling=GroupSampling(sampling, group=group, first_choice=0),
            bypass_prefix_cache=sampling.HasField("prompt_logprobs"),
        )
        if rejection := self._core.submit(request, time.monotonic()):
            raise InvalidRequest(rejection.message)

    def cancel(self, group: int, choices: Collection[int] | None = None) -> list[SequenceEnd]:
        """Ends choices of a group (None: all), and returns the ends of those that were live; nothing more comes of
        them."""
        return self._core.cancel(group, choices, time.monotonic())

    def step(self) -> EngineOutput:
        """Begins as many steps as may be in flight, and waits for the first of them.

        Raises RuntimeError if requests wait that can never run.
        """
        start = time.perf_counter()
        seconds_begun = 0.0
        # Through the bytes that ranks get: what is measured here is what a scheduler does, too.
        while (plan := self._core.schedule(time.monotonic())) is not None:
            message = step_pb2.SchedulerToWorker.FromString(self._codec.encode(plan))
            planned = time.perf_counter()
            pending = self._runner.begin(message.plan)
            self._in_flight.append(_Step(plan, pending, time.perf_counter() - planned))
            seconds_begun += self._in_flight[-1].seconds
        if not self._in_flight:
            raise RuntimeError("no request can run, though some wait: the KV cache is too small for them")
        step = self._in_flight.popleft()
        before_result = time.perf_counter()
        result = step.pending.result()
        computing = step.seconds + time.perf_counter() - before_result
        outcome = self._codec.decode(result)
        outputs = _by_sequence(self._core.apply(outcome.result, time.monotonic()))
        total = time.perf_counter() - start - seconds_begun + step.seconds
        times = self.times
        times.num_steps += 1
        times.total += total
        times.scheduling += total - computing
        times.forward += result.timing.forward
        times.sampling += result.timing.sample
        return EngineOutput(plan=step.plan, prompt_logprobs=outcome.prompt_logprobs, sequences=outputs)


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
    """Loads the model that the options name into this process, with all cores for it unless worker_threads says less.

    Raises ValueError (a model that is not there, weights that are damaged, options that ask for several workers) or
    worker.errors.PermanentError.
    """
    if options.world_size > 1:
        raise ValueError(
            f"tensor_parallel_size={options.tensor_parallel_size}, pipeline_parallel_size="
            f"{options.pipeline_parallel_size}: one process computes alone here; `octavo up` starts a worker for each "
            f"rank, and octavo.Client calls them"
        )
    # These import torch, which takes seconds.
    from worker.cpu.threads import prepare_threads
    from worker.process.build import build_runner

    alone = options.model_copy(update={"data_parallel_size": 1})
    return Engine(build_runner(alone, cores=prepare_threads(alone)), options)
