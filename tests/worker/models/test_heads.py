"""Drafting heads in the formats of their checkpoints against plain references of their papers' forward passes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import cpu_backend
from kernels.shard import Stage
from tests.support.models import heads
from tests.support.models.head_targets import Known, Target, deepseek, eagle, eagle3, llama, load, mtp
from tests.support.models.model_runs import ModelRun, Row, relative_error
from worker.cpu.heads import CpuHead
from worker.models.heads.config import HeadMethod, head_config
from worker.models.heads.head import Head
from worker.step.batch import InputBatch
from worker.weights.reader import WeightsError

LENGTH = 45


class HeadRun:
    """A head beside its target, over the same blocks."""

    def __init__(self, target: Target, head: Head) -> None:
        self.run = ModelRun(target.loaded, kept_layers=head.config.kept_layers, keeps_states=True)
        self.head = CpuHead(head)
        self.cache = self.head.new_cache(num_blocks=self.run.num_blocks, block_size=self.run.block_size)
        for layer in self.cache.layers:
            layer.fill_(1e4)

    def step(self, row: Row, count: int) -> torch.Tensor:
        """Computes the next `count` tokens, first by the target, and returns the head's results."""
        first = row.num_computed
        self.run.step([(row, count)])
        hidden_TE = self.head.states_of(self.run.executor.states(count))
        return self.at(row, first, row.token_ids[first + 1 : first + 1 + count], hidden_TE)

    def at(self, row: Row, first: int, next_ids: Sequence[int], hidden_TE: torch.Tensor) -> torch.Tensor:
        size, count = self.run.block_size, len(next_ids)
        positions = torch.arange(first, first + count)
        blocks = torch.tensor(row.blocks)
        batch = InputBatch.of(
            token_ids_T=torch.tensor(next_ids),
            positions_T=positions,
            slots_T=blocks[positions // size] * size + positions % size,
            query_starts=torch.tensor([0, count]).numpy(),
            context_lens_S=torch.tensor([first + count]).numpy(),
            block_tables_SB=blocks[None].numpy(),
            logit_indices=torch.arange(count),
        )
        return self.head.forward(batch, self.cache, hidden_TE).clone()

    def chain(self, row: Row, first: int, hidden_TE: torch.Tensor, count: int) -> list[int]:
        """Drafts `count` tokens after the head's result hidden_TE [1, E] at position `first`."""
        drafts = self.head.likeliest(hidden_TE)[0].tolist()
        for position in range(first + 1, first + count):
            hidden_TE = self.at(row, position, drafts[-1:], hidden_TE)
            drafts += self.head.likeliest(hidden_TE)[0].tolist()
        return drafts


def check(known: Known) -> None:
    """Compares results and logits for a prompt in chunks, then drafts of a chain."""
    token_ids = prompt()
    run = HeadRun(known.target, known.load())
    row = run.run.row(token_ids, LENGTH + 8)
    got_TE = torch.cat([run.step(row, count) for count in (20, 1, 24)])
    inputs_TE = known.inputs(known.target.states(token_ids[:LENGTH]))
    expected_TE = known.forward(inputs_TE, known.target.embeddings(token_ids[1:]))
    assert relative_error(got_TE, expected_TE) < 1e-4
    logits, expected = run.head.logits(got_TE), known.output(expected_TE)
    assert torch.equal(logits.isfinite(), expected.isfinite())
    assert relative_error(logits[expected.isfinite()], expected[expected.isfinite()]) < 1e-4
    assert torch.equal(run.head.likeliest(got_TE)[0], logits.argmax(-1))

    drafts = run.chain(row, LENGTH - 1, got_TE[-1:], 4)
    assert drafts == known.logits(inputs_TE, token_ids, drafts[:-1]).argmax(-1).tolist()


def prompt() -> list[int]:
    """One more token than a step computes: the head needs to know what comes next."""
    return torch.randint(heads.VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return llama(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle(target: Target, tmp_path: Path, num_layers: int, has_bias: bool) -> None:
    check(eagle(target, tmp_path, num_layers=num_layers, has_bias=has_bias))


def test_eagle_beside_tied_embeddings_without_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's linears are not shared: the head reads the target's output head again."""
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    check(eagle(llama(tmp_path / "target", tied=True), tmp_path / "head"))


@pytest.mark.parametrize("first", ["midlayer", "layers.0"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3(target: Target, tmp_path: Path, first: str, norm_before_residual: bool) -> None:
    """Few tokens can be drafted."""
    check(eagle3(target, tmp_path, first=first, norm_before_residual=norm_before_residual))


def test_eagle3_of_the_last_state_with_its_own_embeddings(target: Target, tmp_path: Path) -> None:
    """As speculators are stored: the layer's fields are nested. The output head is the target's, behind its norm."""
    tensors = heads.eagle3_tensors("layers.0")
    for name in ("fc.weight", "lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    tensors["embed_tokens.weight"] = own = torch.randn(heads.VOCAB, heads.HIDDEN)
    config = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": heads.LAYER,
        "eagle_config": {"use_aux_hidden_state": False},
    }

    def own_of(embeddings: torch.Tensor) -> torch.Tensor:
        """The target's embeddings tell which tokens they are."""
        return own[torch.cdist(embeddings, target.embeddings(range(heads.VOCAB))).argmin(1)]

    known = Known(
        method="eagle3",
        target=target,
        directory=heads.write_head(tmp_path, config, tensors),
        inputs=lambda states: states[-1],
        forward=lambda hidden_TE, embeddings: heads.eagle3(tensors, hidden_TE, own_of(embeddings), first="layers.0"),
        output=lambda x_TE: heads.rms_norm(x_TE, tensors["norm.weight"]) @ target.head_weight.T,
    )
    check(known)


@pytest.mark.parametrize("drop", [(), ("shared_head.head.weight", "embed_tokens.weight")])
def test_mtp(tmp_path: Path, drop: Sequence[str]) -> None:
    check(mtp(tmp_path, drop))


def eagle3_config(**changes: object) -> dict[str, object]:
    return heads.EAGLE3_CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]} | changes


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        (
            "eagle",
            {"architectures": ["MedusaModel"]},
            "'MedusaModel' is no head for method=eagle; EagleLlama",
        ),
        ("eagle3", {"architectures": ["EagleLlamaForCausalLM"]}, "is no head for method=eagle3"),
        ("eagle", {"hidden_size": 64}, "hidden states of 64 numbers; the model's have 48"),
        ("eagle3", {"target_hidden_size": 64}, "hidden states of 64 numbers; the model's have 48"),
        ("eagle3", {"vocab_size": 132}, "vocab_size=132: the model's is 131"),
        ("eagle3", {"draft_vocab_size": 132}, "draft_vocab_size=132: 1 to 131"),
        ("eagle", {"draft_vocab_size": 50}, "draft_vocab_size=50: heads for method=eagle draft from all tokens"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, r"layer_ids=\[0, 2, 6\]: 3 different numbers from"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            r"layer_ids=\[1, 2\]: 3 different numbers",
        ),
        # The third, the middle one and the third last of five are the same.
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, r"layer_ids=\[2, 2, 2\]: 3 different numbers"),
        ("eagle", {"add_para_norm": True}, "add_para_norm=True is not supported"),
        ("eagle", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("eagle", {"num_attention_heads": None}, "config.json: int.. argument must be"),
        ("mtp", {}, "has 0 .num_nextn_predict_layers.: use another method"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_weights_are_read(
    target: Target, tmp_path: Path, method: HeadMethod, config: dict[str, object], message: str
) -> None:
    own = eagle3_config() if method == "eagle3" else heads.EAGLE_CONFIG
    (tmp_path / "config.json").write_text(json.dumps({**own, "architectures": _named(method), **config}))
    with pytest.raises(ValueError, match=message):
        head_config(method, tmp_path, target.loaded.config)


def _named(method: HeadMethod) -> list[str]:
    return ["LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLMEagle"]


def test_states_on_another_stage_are_refused(target: Target, tmp_path: Path) -> None:
    heads.write_head(tmp_path, eagle3_config(), heads.eagle3_tensors())
    message = "before layers 0, 2, 4, and pipeline_parallel_size=2 leaves those before 0, 2 to another stage"
    with pytest.raises(ValueError, match=message):
        head_config("eagle3", tmp_path, target.loaded.config, Stage(1, 2))
    # The state before a stage's first layer is what the stage gets.
    heads.write_head(tmp_path, eagle3_config(eagle_aux_hidden_state_layer_ids=[3, 4, 5]), heads.eagle3_tensors())
    assert head_config("eagle3", tmp_path, target.loaded.config, Stage(1, 2)).kept_layers == (3, 4, 5)


def test_aux_layers_by_default(target: Target, tmp_path: Path) -> None:
    heads.write_head(tmp_path, heads.EAGLE3_CONFIG, heads.eagle3_tensors())
    twelve = replace(target.loaded.config, num_layers=12, layer_windows=(0,) * 12)
    assert head_config("eagle3", tmp_path, twelve).kept_layers == (2, 6, 9)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", None, "lacks 1 of 13 tensors: fc.weight"),
        ("midlayer.hidden_norm.weight", None, "lacks 1 of 13 tensors: midlayer.hidden_norm.weight"),
        ("fc.weight", torch.zeros(48, 96), r"fc.weight has shape \[48, 96\]; the config asks for \[48, 144\]"),
        ("lm_head.weight", None, "lacks 1 of 13 tensors: lm_head.weight"),
        ("extra.weight", torch.zeros(3), "1 tensors are not of this architecture: extra.weight"),
        ("d2t", None, "lacks d2t, which maps the 50 entries"),
        ("d2t", torch.full((50,), 100), "d2t maps drafts to tokens beyond the vocabulary of 131"),
        ("d2t", -torch.arange(50), "d2t maps drafts .* or several to the same one"),
        ("d2t", torch.zeros(49, dtype=torch.int64), r"d2t is stored as I64 of shape \[49\]; integers of shape \[50\]"),
        ("d2t", torch.zeros(50), "d2t is stored as F32"),
        ("t2d", torch.ones(131, dtype=torch.bool), "t2d marks other tokens than d2t maps to"),
    ],
)
def test_tensors_that_are_missing_or_wrong(
    target: Target, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = heads.eagle3_tensors()
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    heads.write_head(tmp_path, eagle3_config(), tensors)
    with pytest.raises(WeightsError, match=message):
        load("eagle3", target, tmp_path)


def test_tensors_of_the_other_methods_that_are_missing(target: Target, tmp_path: Path) -> None:
    tensors = heads.eagle_tensors()
    del tensors["layers.0.post_attention_layernorm.weight"]
    heads.write_head(tmp_path, heads.EAGLE_CONFIG, tensors)
    with pytest.raises(WeightsError, match=r"lacks 1 of 9 tensors: layers.0.post_attention_layernorm.weight"):
        load("eagle", target, tmp_path)
    with pytest.raises(WeightsError, match=r"lacks 1 of \d+ tensors: model.layers.2.eh_proj.weight"):
        load("mtp", deepseek(tmp_path / "deepseek", ["eh_proj.weight"]), None)
