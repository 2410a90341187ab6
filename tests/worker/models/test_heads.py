"""Drafting heads in the formats of their checkpoints against plain references of their papers' forward passes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels import cpu_backend
from tests.support.models import heads
from tests.support.models.head_targets import Known, Target, eagle, eagle3, llama, mtp
from tests.support.models.model_runs import ModelRun, Row, relative_error
from worker.cpu.heads import CpuHead
from worker.models.heads.head import Head
from worker.step.batch import InputBatch

LENGTH = 45


class HeadRun:
    """A head beside its target, over the same blocks."""

    def __init__(self, target: Target, head: Head) -> None:
        self.run = ModelRun(target.loaded, kept_layers=head.config.kept_layers)
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
