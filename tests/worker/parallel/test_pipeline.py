"""Models cut into stages give the bits of one stage, whatever a scheduler does to sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.groups.speculation import SpeculativeConfig
from configs.options import Options
from kernels.cpu_backend import cpu_backend
from kernels.shard import Stage
from octavo.local.engine import Engine, EngineOutput
from protos import inference_pb2 as pb
from protos import step_pb2
from scheduler.core.messages import FinishReason
from tests.support.models.model_runs import ModelRun, Row
from tests.support.models.stages import (
    NUM_LAYERS,
    POISON,
    VOCAB_SIZE,
    Sizes,
    Stages,
    load_stage,
    make_model,
    make_runner,
)
from tests.support.scheduler.steps import decodes, drafting, said
from worker.cpu.runner import Runner
from worker.errors import CollectiveError, PlanError
from worker.models.loader import LoadedModel
from worker.parallel.gloo import GlooPipeline
from worker.step.runner import StepRunner
from worker.weights.cache import WeightCache
from worker.weights.safetensors_files import SafetensorsFiles

HIDDEN_SIZE, HEAD_SIZE = 32, 16


class StagedRun:
    """Runs a model's stages one after the other, on one thread."""

    def __init__(self, stages: Sequence[LoadedModel]) -> None:
        self._runs = [ModelRun(loaded) for loaded in stages]
        self._rows: list[Row] = []

    def start(self, prompt: Sequence[int], room: int) -> None:
        self._rows = [run.row(prompt, room) for run in self._runs]

    def logits(self, num_tokens: int) -> torch.Tensor:
        """Logits of the row's next tokens, [T, V]."""
        hidden_TE = None
        for run, row in zip(self._runs, self._rows, strict=True):
            if hidden_TE is not None:
                run.executor.incoming(num_tokens).copy_(hidden_TE)
            hidden_TE = run.hidden_states([(row, num_tokens)])
        assert hidden_TE is not None
        return self._runs[-1].executor.logits(hidden_TE).clone()

    def append(self, token: int) -> None:
        for row in self._rows:
            row.token_ids.append(token)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_stages_compute_the_bits_of_one(tmp_path: Path, architecture: str) -> None:
    model = make_model(tmp_path, architecture)
    path = cpu_backend(torch.float32, HEAD_SIZE)
    runs = [
        StagedRun([load_stage(model, Stage(index, num_stages), path) for index in range(num_stages)])
        for num_stages in (1, 2, 3, 4)
    ]
    prompt = torch.randint(VOCAB_SIZE - 1, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    for run in runs:
        run.start(prompt, 40)
    for count in (13, 8, 1, 1, 1):
        expected, *others = [run.logits(count) for run in runs]
        assert expected.isfinite().all()
        for logits in others:
            assert torch.equal(logits, expected)
        for run in runs:
            run.append(int(expected[-1].argmax()))


def test_a_stage_reads_what_it_has_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = SafetensorsFiles.read

    def counted(self: SafetensorsFiles, name: str, *args: Any) -> torch.Tensor:
        names.append(name)
        return read(self, name, *args)

    monkeypatch.setattr(SafetensorsFiles, "read", counted)
    model = make_model(tmp_path, "Qwen2ForCausalLM")
    loaded = [load_stage(model, Stage(index, 3, (2, 1, 1))) for index in range(3)]
    whole = load_stage(model, Stage())
    assert sum(each.model.weight_bytes for each in loaded) == whole.model.weight_bytes
    # The stages read each tensor once, and so does the whole model.
    assert sorted(names[: len(names) // 2]) == sorted(names[len(names) // 2 :])
    with pytest.raises(ValueError, match=r"pipeline_layers=2,1 are 3 layers; the model has 4"):
        load_stage(model, Stage(0, 2, (2, 1)))
    with pytest.raises(ValueError, match="pipeline_parallel_size=5: the model has 4 layers; use 4 or less"):
        load_stage(model, Stage(0, 5))


def test_packed_weights_of_an_earlier_start_are_those_of_the_same_layers(tmp_path: Path) -> None:
    model, path = make_model(tmp_path, "LlamaForCausalLM"), cpu_backend(torch.float32, HEAD_SIZE)
    if path.native is None:
        pytest.skip("oneDNN's packed weights cannot be kept")
    (tmp_path / "kept").mkdir()
    cache = WeightCache(tmp_path / "kept", 2**30, smallest=0)
    layouts = [[Stage()], [Stage(0, 2), Stage(1, 2)], [Stage(0, 2, (1, 3)), Stage(1, 2, (1, 3))]]
    logits = []
    for stages in [*layouts, *layouts]:
        run = StagedRun([load_stage(model, stage, path, cache) for stage in stages])
        run.start([5, 6, 7], 3)
        logits.append(run.logits(3))
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 5
    assert all(torch.equal(each, logits[0]) for each in logits)


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (list(range(20, 60)), {}),
    (list(range(20, 50)), {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    ([7, 8, 9], {"temperature": 0.7, "seed": 6, "n": 3, "logprobs": 2, "max_tokens": 9}),
    ([3] * 25, {"prompt_logprobs": 1, "min_tokens": 8, "ignore_eos": False}),
    ([11, POISON, 12], {}),
    (list(range(20, 60)), {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.4}),
    ([90, 91], {"temperature": 0.8, "seed": 9, "top_p": 0.9, "logit_bias": {5: 3.0}}),
]


@dataclass
class Outcome:
    """The outputs, by group and choice."""

    tokens: dict[Any, list[int]] = field(default_factory=dict)
    ends: dict[Any, FinishReason] = field(default_factory=dict)
    # Logprobs of output tokens and of prompts.
    logprobs: dict[Any, list[float]] = field(default_factory=dict)

    def note(self, output: EngineOutput) -> None:
        for key, frame in output.prompt_logprobs:
            self.logprobs.setdefault(key, []).extend(each.chosen.logprob for each in frame.logprobs)
        for sequence in output.sequences:
            self.tokens.setdefault(sequence.key, []).extend(sequence.token_ids)
            self.logprobs.setdefault(sequence.key, []).extend(map(_logprob, sequence.logprobs))
            if sequence.end is not None:
                self.ends[sequence.key] = sequence.end.reason


def _logprob(each: object) -> float:
    assert isinstance(each, pb.TokenLogprobs)
    return each.chosen.logprob


def _run(runner: StepRunner, sizes: Sizes, num_stages: int, mode: Any) -> tuple[Outcome, Engine]:
    options = Options(
        block_size=8,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        pipeline_parallel_size=num_stages,
        preemption_mode=mode,
    )
    engine = Engine(runner, options)
    outcome = Outcome()
    # In the second turn prefixes are known, and blocks hold what earlier sequences left there.
    for turn in range(2):
        for index, (prompt, params) in enumerate(REQUESTS):
            sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "n": 1, "top_p": 1.0, **params}
            sampling.setdefault("repetition_penalty", 1.0)
            engine.submit(len(REQUESTS) * turn + index, prompt, pb.SamplingParams(**sampling))
        while engine.has_work:
            outcome.note(engine.step())
    return outcome, engine


@pytest.mark.parametrize(("num_stages", "mode"), [(2, "recompute"), (4, "swap")])
def test_through_a_scheduler_stages_say_what_one_says(tmp_path: Path, num_stages: int, mode: str) -> None:
    """Prompts in chunks, preemptions, known prefixes, failed rows, and every sampling option."""
    model = make_model(tmp_path, "Qwen2ForCausalLM")
    in_flight = num_stages + 1
    sizes = Sizes(
        num_blocks=17,
        num_swap_blocks=20 if mode == "swap" else 0,
        max_num_batched_tokens=24,
        max_steps_in_flight=in_flight,
    )
    expected, _ = _run(make_runner(model, Stage(), sizes), sizes, 1, mode)
    runners = [make_runner(model, Stage(index, num_stages), sizes) for index in range(num_stages)]
    stages = Stages(runners, tmp_path, max_steps_in_flight=in_flight)
    actual, engine = _run(stages, sizes, num_stages, mode)
    assert actual.tokens == expected.tokens
    assert actual.ends == expected.ends
    assert FinishReason.ERROR in actual.ends.values()
    for key, logprobs in expected.logprobs.items():
        # PyTorch's kernels round a row differently in different batches.
        assert actual.logprobs[key] == pytest.approx(logprobs, abs=1e-4)
    assert any(actual.logprobs.values())
    assert engine.num_preemptions
    stages.join(None)


@pytest.fixture
def alone_and_staged(tmp_path: Path) -> Iterator[tuple[Runner, Stages]]:
    """A runner of one stage, and one of three."""
    model, sizes = make_model(tmp_path, "Qwen2ForCausalLM"), Sizes(max_steps_in_flight=4)
    runners = [make_runner(model, Stage(index, 3), sizes) for index in range(3)]
    stages = Stages(runners, tmp_path, max_steps_in_flight=4)
    yield make_runner(model, Stage(), sizes), stages
    stages.join(None)


def _new_row(row: int, tokens: Sequence[int], blocks: Sequence[int], **fields: Any) -> step_pb2.NewRow:
    sampling = pb.SamplingParams(temperature=0.0)
    values = {"row": row, "sequence": 1 + row, "token_ids": tokens, "num_prompt_tokens": len(tokens), **fields}
    return step_pb2.NewRow(block_ids=blocks, sampling=sampling, **values)


def test_drafts_are_verified_for_all_stages(alone_and_staged: tuple[Runner, Stages]) -> None:
    """The first stages must learn how many drafts were accepted to compute the next step."""
    alone, staged = alone_and_staged
    prompt = [5, 6, 7, 8, 9]
    guess = alone.execute(step_pb2.StepPlan(step=1, new_rows=[_new_row(0, prompt, [1, 2])], rows=[0], num_tokens=[5]))
    first = said(guess).token_ids[0]
    second, third = (
        said(alone.execute(step_pb2.StepPlan(step=step, decode_rows=decodes(0)))).token_ids[0] for step in (2, 3)
    )
    alone.reset()
    wrong = (third + 1) % VOCAB_SIZE
    new = [_new_row(0, prompt, [1, 2]), _new_row(1, [*prompt, first], [3, 4], num_prompt_tokens=5)]
    plans = [
        step_pb2.StepPlan(step=1, new_rows=new, rows=[0, 1], num_tokens=[5, 6]),
        # Both drafts of row 0 are right. Row 1's second draft is wrong, and its output after that is not known yet.
        step_pb2.StepPlan(step=2, **drafting({1: [third, wrong], 0: [second, third]})),
        step_pb2.StepPlan(step=3, decode_rows=decodes(0, 1)),
        step_pb2.StepPlan(step=4, decode_rows=decodes(1), rows=[0], num_tokens=[1]),
    ]
    for plan in plans:
        expected, actual = alone.execute(plan), staged.execute(plan)
        assert said(actual) == said(expected)
    # In the second step all drafts of row 0 were accepted.
    assert said(alone.execute(step_pb2.StepPlan(step=5, decode_rows=decodes(0)))).positions == [6]


def test_a_row_may_be_freed_while_its_step_is_under_way(alone_and_staged: tuple[Runner, Stages]) -> None:
    """Its block goes to another row, whose attention must not see the block's old content at any stage."""
    _, staged = alone_and_staged
    poisoned, other = _new_row(0, [5, POISON, POISON, POISON], [1]), _new_row(1, [5, 6], [1])
    first = staged.begin(step_pb2.StepPlan(step=1, new_rows=[poisoned], rows=[0], num_tokens=[4]))
    second = staged.begin(step_pb2.StepPlan(step=2, freed_rows=[0], new_rows=[other], rows=[1], num_tokens=[2]))
    assert list(first.result().failed_sequences) == [1]
    assert said(second.result()).sequences == [2]
    # A decode reads whole blocks.
    assert said(staged.execute(step_pb2.StepPlan(step=3, decode_rows=decodes(1)))).sequences == [2]


def test_a_plan_that_contradicts_the_rows_is_refused_at_each_stage(alone_and_staged: tuple[Runner, Stages]) -> None:
    _, staged = alone_and_staged
    plan = step_pb2.StepPlan(step=1, decode_rows=decodes(3))
    for stage in staged.stages:
        with pytest.raises(PlanError, match="row 3 holds no sequence"):
            stage.begin(plan).result()
    staged.reset()
    for step in range(1, 5):
        staged.stages[1].begin(
            step_pb2.StepPlan(step=step, new_rows=[_new_row(step, [5], [step])], rows=[step], num_tokens=[1])
        )
    with pytest.raises(PlanError, match="5 comes while 4 results are awaited; max_steps_in_flight is 4"):
        staged.stages[1].begin(step_pb2.StepPlan(step=5, decode_rows=decodes(3)))


def test_stages_that_wait_for_one_that_leaves_say_what_they_waited_for(
    alone_and_staged: tuple[Runner, Stages],
) -> None:
    """They can also be told to leave with steps in flight: the thread that takes the next Reset is never blocked."""
    _, staged = alone_and_staged
    plan = step_pb2.StepPlan(step=7, new_rows=[_new_row(0, [5, 6, 7], [1])], rows=[0], num_tokens=[3])
    waiting = [stage.begin(plan) for stage in staged.stages[1:]]
    staged.stages[0].join(None)
    with pytest.raises(
        CollectiveError,
        match=r"pipeline of ranks 0, 1, 2: receiving 384 bytes of step 7 from stage 0 at stage 1 failed",
    ):
        waiting[0].result()
    # Stage 1 has not been told to leave yet; when it does, stage 2 learns of it.
    staged.stages[1].join(None)
    with pytest.raises(CollectiveError, match="of step 7 from stage 1 at stage 2 failed"):
        waiting[1].result()
    for stage in staged.stages:
        stage.join(None)
        stage.reset()


def test_what_a_decode_step_sends_is_what_the_docs_say(alone_and_staged: tuple[Runner, Stages]) -> None:
    """docs/architecture.md: T x E float32 to the next stage; 8 bytes a token from the last stage to each other one."""
    _, staged = alone_and_staged
    new = [_new_row(row, [5, 6, row], [row + 1]) for row in range(3)]
    staged.execute(step_pb2.StepPlan(step=1, new_rows=new, rows=[0, 1, 2], num_tokens=[3, 3, 3]))
    before = [_sent(groups.pipeline) for groups in staged.groups]
    num_steps = 2
    for step in range(2, 2 + num_steps):
        staged.execute(step_pb2.StepPlan(step=step, decode_rows=decodes(0, 1, 2)))
    after = [_sent(groups.pipeline) for groups in staged.groups]
    num_stages, num_rows = 3, len(new)
    stream, said = (1, num_rows * HIDDEN_SIZE * 4), (num_stages - 1, (num_stages - 1) * 8 * num_rows)
    for index, one_step in enumerate((stream, stream, said)):
        calls, num_bytes = after[index][0] - before[index][0], after[index][1] - before[index][1]
        assert (calls, num_bytes) == (num_steps * one_step[0], num_steps * one_step[1])


def _sent(link: object) -> tuple[int, int]:
    assert isinstance(link, GlooPipeline)
    return link.num_calls, link.num_bytes


def test_layers_of_stages() -> None:
    with pytest.raises(ValueError, match="pipeline_layers=2,2 with pipeline_parallel_size=3: give one number"):
        Options(pipeline_parallel_size=3, pipeline_layers=(2, 2))
    with pytest.raises(ValueError, match="pipeline_layers=4,0 with pipeline_parallel_size=2"):
        Options(pipeline_parallel_size=2, pipeline_layers=(NUM_LAYERS, 0))
    assert Options(pipeline_parallel_size=3, pipeline_layers=(1, 2, 1)).max_steps_in_flight == 4
    assert Options(pipeline_parallel_size=3, max_steps_in_flight=2).max_steps_in_flight == 2
    assert Options().max_steps_in_flight == 2
    drafts = SpeculativeConfig.model_validate({"method": "ngram"})
    assert Options(speculative_config=drafts).max_steps_in_flight == 1
    assert Options(speculative_config=drafts, pipeline_parallel_size=2).max_steps_in_flight == 3
