"""A core and a runner, as a scheduler and its worker use them: requests in, whole outputs out."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import inference_pb2, step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import (
    ChoiceStart,
    CoreSettings,
    CoreStats,
    FinishReason,
    GroupRequest,
    SequenceEnd,
    SequenceKey,
    StepCosts,
    StopRules,
)
from scheduler.ranks.group_requests import is_constrained
from scheduler.ranks.step_wire import GroupSampling, StepCodec
from worker.step.runner import PendingResult, StepRunner


@dataclass
class Generated:
    tokens: dict[SequenceKey, list[int]] = field(default_factory=dict)
    logprobs: dict[SequenceKey, list[object]] = field(default_factory=dict)
    ends: dict[SequenceKey, SequenceEnd] = field(default_factory=dict)
    stats: CoreStats = field(default_factory=CoreStats)
    # The most steps in flight of a sequence.
    most_in_flight: dict[SequenceKey, int] = field(default_factory=dict)
    # What the workers proposed: sequence, output position of the first draft, drafts.
    proposed: list[tuple[SequenceKey, int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def texts(self) -> list[tuple[list[int], FinishReason, str]]:
        """Outputs with their ends, in the order of requests and choices."""
        return [(self.tokens.get(key, []), end.reason, end.message) for key, end in sorted(self.ends.items())]


@dataclass(frozen=True)
class Asked:
    prompt: Sequence[int]
    sampling: inference_pb2.SamplingParams
    num_choices: int = 1
    # Output so far of each choice.
    output: Sequence[int] = ()


def generate(
    runner: StepRunner,
    settings: CoreSettings,
    asked: Sequence[Asked],
    *,
    lose_at: int = 0,
    costs: StepCosts | None = None,
) -> Generated:
    """Runs requests at once. lose_at: after so many steps the workers are lost, and all begins anew from tokens. costs:
    what the core believes of steps."""
    settings = dataclasses.replace(settings, holds_constrained=runner.holds_constrained)
    core, codec, made = Core(settings), StepCodec(0), Generated()
    if costs is not None:
        core.set_costs(costs)
    for group, each in enumerate(asked, 1):
        params = each.sampling
        request = GroupRequest(
            group=group,
            request_id=str(group),
            prompt_token_ids=tuple(each.prompt),
            choices=tuple(ChoiceStart(choice=i, output_token_ids=tuple(each.output)) for i in range(each.num_choices)),
            stop=StopRules(
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                ignore_eos=params.ignore_eos,
            ),
            sampling=GroupSampling(params, group=group, first_choice=0),
            is_constrained=is_constrained(params),
        )
        assert core.submit(request, 0.0) is None
    in_flight: deque[PendingResult] = deque()
    num_steps = 0
    while core.has_work:
        while (plan := core.schedule(0.0)) is not None:
            message = step_pb2.SchedulerToWorker.FromString(codec.encode(plan))
            in_flight.append(runner.begin(message.plan))
            _count(core, made)
        made.stats = core.stats
        num_steps += 1
        if num_steps == lose_at:
            in_flight.clear()
            runner.reset()
            core.lose_workers(0.0)
            core.resize(settings.num_blocks, settings.num_swap_blocks, now=0.0)
            codec = StepCodec(0)
            continue
        result = codec.decode(in_flight.popleft().result()).result
        drafted = [(core.key_of(sequence), drafts) for sequence, drafts in result.drafts.items()]
        outputs = core.apply(result, 0.0)
        core.check_integrity()
        counts = [1] * len(outputs.groups) if outputs.num_tokens is None else outputs.num_tokens.tolist()
        tokens = iter(outputs.token_ids.tolist())
        for index, (group, choice, count) in enumerate(
            zip(outputs.groups.tolist(), outputs.choices.tolist(), counts, strict=True)
        ):
            made.tokens.setdefault((group, choice), []).extend(next(tokens) for _ in range(count))
            made.logprobs.setdefault((group, choice), []).extend(outputs.logprobs.get(index, ()))
        made.ends |= {end.key: end for end in outputs.ends}
        made.proposed += [(key, len(made.tokens[key]), drafts) for key, drafts in drafted if key is not None]
    made.stats = core.stats
    for result in in_flight:
        result.result()
    return made


def _count(core: Core, made: Generated) -> None:
    times: dict[SequenceKey, int] = {}
    for step in core._state.in_flight:
        for generation in step.generations.tolist():
            if (key := core.key_of(generation)) is not None:
                times[key] = times.get(key, 0) + 1
    for key, count in times.items():
        made.most_in_flight[key] = max(made.most_in_flight.get(key, 0), count)
