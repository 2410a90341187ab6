"""Drafting heads in the formats of their checkpoints against plain references of their papers' forward passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kernels import cpu_backend
from runtime.model_files import resolve_model
from tests.support.models import heads
from tests.support.models.heads import Tensors, write_head
from tests.support.models.model_runs import ModelRun, Row, relative_error
from worker.cpu.heads import CpuHead
from worker.models.heads.config import HeadMethod, head_config
from worker.models.heads.head import Head
from worker.models.heads.loader import HeadFiles, load_head
from worker.models.loader import LoadedModel, load_model
from worker.step.batch import InputBatch

NUM_LAYERS = 5
AUX_LAYERS = (0, 2, 4)
LENGTH = 45
# The last layer of the DeepSeek model.
LAST_LAYER = 1
# Inputs of the head -> its results.
Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Target:
    path: Path
    reference: PreTrainedModel
    loaded: LoadedModel

    def states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """Before each layer, then behind the last norm."""
        with torch.inference_mode():
            given = self.reference(torch.tensor([token_ids]), output_hidden_states=True)
        return [each[0] for each in given.hidden_states]

    def embeddings(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._weight("model.embed_tokens")[torch.tensor(token_ids)]

    @property
    def head_weight(self) -> torch.Tensor:
        return self._weight("lm_head")

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.reference.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach()


def target_of(model: PreTrainedModel, path: Path, extra: Tensors | None = None) -> Target:
    """extra: tensors that the checkpoint holds beside the model's."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.eval().save_pretrained(path)
    if extra is not None:
        file = path / "model.safetensors"
        save_file(load_file(file) | extra, file)
    return Target(path, model, load_model(resolve_model(str(path)), dtype=torch.float32))


def llama(path: Path, *, tied: bool = False) -> Target:
    config = LlamaConfig(
        vocab_size=heads.VOCAB, hidden_size=heads.HIDDEN, intermediate_size=heads.FFN, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=heads.HEADS, num_key_value_heads=heads.KV_HEADS, max_position_embeddings=256,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return target_of(LlamaForCausalLM(config), path)


DEEPSEEK: dict[str, Any] = {
    "vocab_size": heads.VOCAB, "hidden_size": heads.HIDDEN, "intermediate_size": heads.FFN, "num_hidden_layers": 2,
    "num_attention_heads": heads.HEADS, "num_key_value_heads": heads.HEADS, "max_position_embeddings": 256,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip


def deepseek(path: Path, drop: Sequence[str] = ()) -> Target:
    """Its layer for multi-token prediction has the shapes of its last layer, and what the paper adds."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    last, prefix = f"model.layers.{LAST_LAYER}", f"model.layers.{LAST_LAYER + 1}"
    shapes = {
        name.replace(last, prefix): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith(f"{last}.")
    }
    shapes |= stored_experts(shapes, prefix)
    hidden, vocab = heads.HIDDEN, heads.VOCAB
    shapes |= {
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
        f"{prefix}.shared_head.head.weight": (vocab, hidden),
        f"{prefix}.embed_tokens.weight": (vocab, hidden),
    }
    extra = heads.random_tensors(shapes)
    for name in drop:
        del extra[f"{prefix}.{name}"]
    return target_of(model, path, extra)


LAST_LAYER = 1


def stored_experts(shapes: dict[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    """Checkpoints hold experts one by one; transformers, all of a layer in two tensors."""
    for name in [name for name in shapes if ".experts." in name]:
        del shapes[name]
    up, down = (DEEPSEEK["moe_intermediate_size"], heads.HIDDEN), (heads.HIDDEN, DEEPSEEK["moe_intermediate_size"])
    return {
        f"{prefix}.mlp.experts.{expert}.{name}_proj.weight": shape
        for expert in range(DEEPSEEK["n_routed_experts"])
        for name, shape in (("gate", up), ("up", up), ("down", down))
    }


def load(method: HeadMethod, target: Target, directory: Path | None, dtype: torch.dtype = torch.float32) -> Head:
    config = head_config(method, directory, target.loaded.config)
    files = HeadFiles(
        target=resolve_model(str(target.path)),
        speculator=None if directory is None else resolve_model(str(directory)),
    )
    return load_head(files, config, target.loaded, dtype=dtype, quantization="auto")


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
        drafts = self.head.likeliest(hidden_TE).tolist()
        for position in range(first + 1, first + count):
            hidden_TE = self.at(row, position, drafts[-1:], hidden_TE)
            drafts += self.head.likeliest(hidden_TE).tolist()
        return drafts


def check(
    target: Target,
    head: Head,
    states_TE: torch.Tensor,
    reference: Reference,
    output: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Compares results and logits for a prompt in chunks, then drafts of a chain. states_TE: the reference's first
    inputs. output: results -> logits of all tokens."""
    token_ids = prompt()
    assert len(states_TE) == LENGTH
    run = HeadRun(target, head)
    row = run.run.row(token_ids, LENGTH + 8)
    got_TE = torch.cat([run.step(row, count) for count in (20, 1, 24)])
    expected_TE = reference(states_TE, target.embeddings(token_ids[1:]))
    assert relative_error(got_TE, expected_TE) < 1e-4
    logits, expected = run.head.logits(got_TE), output(expected_TE)
    finite = expected.isfinite()
    assert torch.equal(logits.isfinite(), finite)
    assert relative_error(logits[finite], expected[finite]) < 1e-4
    assert torch.equal(run.head.likeliest(got_TE), logits.argmax(-1))

    drafts = run.chain(row, LENGTH - 1, got_TE[-1:], 4)
    inputs_TE, next_ids = states_TE, list(token_ids[1:])
    for _ in range(3):
        inputs_TE = torch.cat((inputs_TE, expected_TE[-1:]))
        next_ids.append(int(output(expected_TE[-1:]).argmax()))
        expected_TE = reference(inputs_TE, target.embeddings(next_ids))
    assert drafts == [*next_ids[LENGTH:], int(output(expected_TE[-1:]).argmax())]


def prompt() -> list[int]:
    """One more token than a step computes: the head needs to know what comes next."""
    return torch.randint(heads.VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return llama(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle(target: Target, tmp_path: Path, num_layers: int, has_bias: bool) -> None:
    tensors = heads.eagle_tensors(num_layers)
    if has_bias:
        tensors["fc.bias"] = torch.randn(heads.HIDDEN)
    # Copies of the target's, which the head reads from the target.
    copies = {"embed_tokens.weight": torch.zeros(heads.VOCAB, heads.HIDDEN)}
    write_head(tmp_path, heads.EAGLE_CONFIG | {"num_hidden_layers": num_layers}, tensors | copies)
    check(
        target,
        load("eagle", target, tmp_path),
        target.states(prompt()[:LENGTH])[-1],
        lambda hidden_TE, embeddings: heads.eagle(tensors, hidden_TE, embeddings, num_layers),
        lambda x_TE: x_TE @ target.head_weight.T,
    )


def test_eagle_beside_tied_embeddings_without_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's linears are not shared: the head reads the target's output head again."""
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    target, tensors = llama(tmp_path / "target", tied=True), heads.eagle_tensors()
    directory = write_head(tmp_path / "head", heads.EAGLE_CONFIG, tensors)
    check(
        target,
        load("eagle", target, directory),
        target.states(prompt()[:LENGTH])[-1],
        lambda hidden_TE, embeddings: heads.eagle(tensors, hidden_TE, embeddings),
        lambda x_TE: x_TE @ target.head_weight.T,
    )


@pytest.mark.parametrize("first", ["midlayer", "layers.0"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle3(target: Target, tmp_path: Path, first: str, norm_before_residual: bool) -> None:
    """Few tokens can be drafted. Without a list in the config the states are those before layers 2, 5 // 2 and 5 - 3,
    so this target needs one."""
    tensors = heads.eagle3_tensors(first)
    config = heads.EAGLE3_CONFIG | {
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "norm_before_residual": norm_before_residual,
    }  # fmt: skip
    write_head(tmp_path, config, tensors)
    states = target.states(prompt()[:LENGTH])

    def output(x_TE: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(x_TE), heads.VOCAB), -torch.inf)
        places = torch.arange(heads.NUM_DRAFTABLE)
        logits[:, places + tensors["d2t"]] = heads.rms_norm(x_TE, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        return logits

    check(
        target,
        load("eagle3", target, tmp_path),
        torch.cat([states[layer] for layer in AUX_LAYERS], 1) @ tensors["fc.weight"].T,
        lambda hidden_TE, embeddings: heads.eagle3(
            tensors, hidden_TE, embeddings, first=first, norm_before_residual=norm_before_residual
        ),
        output,
    )


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
    head = load("eagle3", target, write_head(tmp_path, config, tensors))
    check(
        target,
        head,
        target.states(prompt()[:LENGTH])[-1],
        # The embeddings of the target tell which tokens they are.
        lambda hidden_TE, embeddings: heads.eagle3(
            tensors, hidden_TE, own[torch.cdist(embeddings, target.embeddings(range(heads.VOCAB))).argmin(1)],
            first="layers.0",
        ),
        lambda x_TE: heads.rms_norm(x_TE, tensors["norm.weight"]) @ target.head_weight.T,
    )  # fmt: skip


@pytest.mark.parametrize("drop", [(), ("shared_head.head.weight", "embed_tokens.weight")])
def test_mtp(tmp_path: Path, drop: Sequence[str]) -> None:
    target = deepseek(tmp_path, drop)
    prefix = f"model.layers.{LAST_LAYER + 1}"
    tensors = load_file(tmp_path / "model.safetensors")
    head_weight = target.head_weight if drop else tensors[f"{prefix}.shared_head.head.weight"]
    norm_E = tensors[f"{prefix}.shared_head.norm.weight"]
    check(
        target,
        load("mtp", target, None),
        target.states(prompt()[:LENGTH])[-1],
        lambda hidden_TE, embeddings: heads.mtp(tensors, target.reference.config, prefix, hidden_TE, embeddings),
        lambda x_TE: heads.rms_norm(x_TE, norm_E, target.loaded.config.rms_norm_eps) @ head_weight.T,
    )
