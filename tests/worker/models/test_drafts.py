"""Speculation end to end, on a tiny model: a core that plans drafts and a runner that verifies them.

In place of a drafter of the workers, a stand-in knows the answers and is wrong now and then.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from configs.options import Options
from protos import inference_pb2, step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import (
    ChoiceStart,
    CoreStats,
    GroupRequest,
    SequenceKey,
    Speculation,
    StopRules,
)
from scheduler.ranks.step_wire import GroupSampling, StepCodec
from scheduler.settings import core_settings
from tests.support.models.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.support.scheduler.costs import FREE
from worker.cpu.build import build_cpu_runner
from worker.cpu.runner import Runner

NUM_TOKENS = 40
PROMPTS = [[5, 6, 7], list(range(10, 60)), [50] * 9, [3, 4, 3, 4, 3, 4, 3]]
KINDS = [
    inference_pb2.SamplingParams(temperature=0.0),
    inference_pb2.SamplingParams(temperature=1.0, top_p=0.95, seed=3),
    inference_pb2.SamplingParams(temperature=1.5, seed=8, repetition_penalty=1.3, presence_penalty=0.5),
    inference_pb2.SamplingParams(temperature=0.0, logprobs=1, frequency_penalty=1.0),
]
Outputs = dict[SequenceKey, list[int]]


class KnowingDrafter:
    """Proposes the output computed without drafts, with every `wrong`th token wrong."""

    def __init__(self, answers: Outputs, count: int, wrong: int) -> None:
        self._answers, self._count, self._wrong = answers, count, wrong

    def propose(self, key: SequenceKey, start: int) -> list[int]:
        said = self._answers[key][start : start + self._count]
        return [(token + (start + i) % self._wrong // (self._wrong - 1)) % VOCAB_SIZE for i, token in enumerate(said)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return build_cpu_runner(options(tmp_path_factory.mktemp("tiny")))


def options(directory: Path, **changes: object) -> Options:
    fields: dict[str, object] = {
        "model": str(make_tiny_model(directory)),
        "load_format": "dummy",
        "dtype": "float32",
        "block_size": 8,
        "num_blocks_override": 40,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "worker_threads": 1,
    }
    return Options(**(fields | changes))  # type: ignore[arg-type]


def generate(
    runner: Runner, given: Options, drafter: KnowingDrafter | None = None, num_speculative_tokens: int = 0
) -> tuple[Outputs, CoreStats]:
    """Runs all prompts at once, with two choices each."""
    runner.reset()
    settings = core_settings(given, runner.model_info)
    speculation = Speculation(num_speculative_tokens=num_speculative_tokens, workers_draft=True)
    core = Core(dataclasses.replace(settings, speculation=speculation if num_speculative_tokens else None))
    # Drafts always pay.
    core.set_costs(FREE)
    codec, outputs = StepCodec(0), Outputs()
    for group, (prompt, params) in enumerate(zip(PROMPTS, KINDS, strict=True), 1):
        request = GroupRequest(
            group=group,
            request_id=str(group),
            prompt_token_ids=tuple(prompt),
            choices=(ChoiceStart(choice=0), ChoiceStart(choice=1)),
            stop=StopRules(max_tokens=NUM_TOKENS, ignore_eos=True),
            sampling=GroupSampling(params, group=group, first_choice=0),
        )
        assert core.submit(request, 0.0) is None
    plans: list[bytes] = []
    while core.has_work:
        while (plan := core.schedule(0.0)) is not None:
            plans.append(codec.encode(plan))
        message = runner.execute(step_pb2.SchedulerToWorker.FromString(plans.pop(0)).plan)
        if drafter is not None:
            add_drafts(message, core, drafter)
        made = core.apply(codec.decode(message).result, 0.0)
        core.check_integrity()
        counts: Sequence[int] = [1] * len(made.groups) if made.num_tokens is None else made.num_tokens.tolist()
        token_ids = iter(made.token_ids.tolist())
        for group, choice, first, count in zip(
            made.groups.tolist(), made.choices.tolist(), made.first_tokens.tolist(), counts, strict=True
        ):
            said = outputs.setdefault((group, choice), [])
            assert first == len(said)
            said += [next(token_ids) for _ in range(count)]
        assert not any(end.message for end in made.ends)
    return outputs, core.stats


def add_drafts(message: step_pb2.StepResult, core: Core, drafter: KnowingDrafter) -> None:
    sequences = np.frombuffer(message.sequences, "<i8").tolist()
    positions = np.frombuffer(message.positions, "<i4").tolist()
    counts = np.frombuffer(message.num_tokens, "<i4").tolist() or [1] * len(sequences)
    for sequence, position, count in zip(sequences, positions, counts, strict=True):
        if (key := core.key_of(sequence)) is not None:
            message.drafts.add(sequence=sequence, token_ids=drafter.propose(key, position + count))


@pytest.fixture(scope="module")
def expected(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    outputs, stats = generate(runner, options(tmp_path_factory.mktemp("tiny")))
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs.values())
    assert stats.num_draft_tokens == 0
    return outputs


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("count", "wrong"), [(1, 1000), (4, 1000), (4, 3), (7, 2)])
def test_output_never_depends_on_drafts(
    runner: Runner, expected: Outputs, tmp_path: Path, count: int, wrong: int, steps: int
) -> None:
    drafter = KnowingDrafter(expected, count, wrong)
    outputs, stats = generate(
        runner, options(tmp_path, max_steps_in_flight=steps), drafter, num_speculative_tokens=count
    )
    assert outputs == expected
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    # With steps ahead, a preemption may have discarded some.
    if wrong == 1000 and steps == 1:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
