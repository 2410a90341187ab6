"""Tiny models that heads draft for, as transformers computes them and as they are loaded, and heads with references."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from runtime.model_files import resolve_model
from tests.support.models import heads
from tests.support.models.heads import Tensors
from worker.models.heads.config import HeadMethod, head_config
from worker.models.heads.head import Head
from worker.models.heads.loader import HeadFiles, load_head
from worker.models.loader import LoadedModel, load_model

NUM_LAYERS = 5
# The last layer of the DeepSeek model.
LAST_LAYER = 1


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


Change = Callable[[str, torch.Tensor], None]


def as_they_are(name: str, tensor: torch.Tensor) -> None:
    """Leaves random weights as they are."""


def target_of(model: PreTrainedModel, path: Path, extra: Tensors | None = None, change: Change = as_they_are) -> Target:
    """extra: tensors that the checkpoint holds beside the model's. change: changes the model's, in place."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
        change(name, parameter.data)
    model.eval().save_pretrained(path)
    if extra is not None:
        file = path / "model.safetensors"
        save_file(load_file(file) | extra, file)
    return Target(path, model, load_model(resolve_model(str(path)), dtype=torch.float32))


def llama(path: Path, *, tied: bool = False, change: Change = as_they_are) -> Target:
    config = LlamaConfig(
        vocab_size=heads.VOCAB,
        hidden_size=heads.HIDDEN,
        intermediate_size=heads.FFN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=heads.HEADS,
        num_key_value_heads=heads.KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    return target_of(LlamaForCausalLM(config), path, change=change)


DEEPSEEK: dict[str, Any] = {
    "vocab_size": heads.VOCAB,
    "hidden_size": heads.HIDDEN,
    "intermediate_size": heads.FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": heads.HEADS,
    "num_key_value_heads": heads.HEADS,
    "max_position_embeddings": 256,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def deepseek(path: Path, drop: Sequence[str] = (), change: Change = as_they_are) -> Target:
    """Its layer for multi-token prediction has the shapes of its last layer, and what the paper adds. drop: tensors of
    that layer that the checkpoint does not hold."""
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
    for name, tensor in extra.items():
        change(name, tensor)
    return target_of(model, path, extra, change)


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


@dataclass(kw_only=True)
class Known:
    """A head of a target, and its forward pass by a plain reference. directory: None for mtp.

    inputs: the target's states -> what the first pass reads. forward: that and embeddings of the next tokens ->
    results. output: results -> logits of all tokens, -inf for those that can't be drafted.
    """

    method: HeadMethod
    target: Target
    directory: Path | None
    inputs: Callable[[list[torch.Tensor]], torch.Tensor]
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor]

    def load(self) -> Head:
        return load(self.method, self.target, self.directory)

    def logits(self, inputs_TE: torch.Tensor, token_ids: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Returns the logits of the draft behind token_ids, and of one more behind each of the drafts, [1 + drafts, V].
        inputs_TE: of these tokens or more."""
        hidden_TE, next_ids, logits = inputs_TE[: len(token_ids) - 1], list(token_ids[1:]), []
        for draft in [*drafts, None]:
            result_TE = self.forward(hidden_TE, self.target.embeddings(next_ids))
            logits.append(self.output(result_TE[-1:]))
            if draft is not None:
                hidden_TE, next_ids = torch.cat((hidden_TE, result_TE[-1:])), [*next_ids, draft]
        return torch.cat(logits)


def eagle(target: Target, directory: Path, *, num_layers: int = 1, has_bias: bool = False) -> Known:
    tensors = heads.eagle_tensors(num_layers)
    if has_bias:
        tensors["fc.bias"] = torch.randn(heads.HIDDEN)
    # A head reads the target's embeddings, not this one.
    copies = {"embed_tokens.weight": torch.zeros(heads.VOCAB, heads.HIDDEN)}
    heads.write_head(directory, heads.EAGLE_CONFIG | {"num_hidden_layers": num_layers}, tensors | copies)
    return Known(
        method="eagle",
        target=target,
        directory=directory,
        inputs=lambda states: states[-1],
        forward=lambda hidden_TE, embeddings: heads.eagle(tensors, hidden_TE, embeddings, num_layers),
        output=lambda x_TE: x_TE @ target.head_weight.T,
    )


AUX_LAYERS = (0, 2, 4)


def eagle3(target: Target, directory: Path, *, first: str = "midlayer", norm_before_residual: bool = False) -> Known:
    tensors = heads.eagle3_tensors(first)
    # By default these are the layers 2, 5 // 2 and 5 - 3, so this target needs a list.
    config = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "norm_before_residual": norm_before_residual}
    heads.write_head(directory, heads.EAGLE3_CONFIG | config, tensors)

    def output(x_TE: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(x_TE), heads.VOCAB), -torch.inf)
        ids = torch.arange(heads.NUM_DRAFTABLE) + tensors["d2t"]
        logits[:, ids] = heads.rms_norm(x_TE, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        return logits

    return Known(
        method="eagle3",
        target=target,
        directory=directory,
        inputs=lambda states: torch.cat([states[layer] for layer in AUX_LAYERS], 1) @ tensors["fc.weight"].T,
        forward=lambda hidden_TE, embeddings: heads.eagle3(
            tensors, hidden_TE, embeddings, first=first, norm_before_residual=norm_before_residual
        ),
        output=output,
    )


def mtp(directory: Path, drop: Sequence[str] = (), change: Change = as_they_are) -> Known:
    """drop, change: see deepseek."""
    target = deepseek(directory, drop, change)
    prefix, tensors = f"model.layers.{LAST_LAYER + 1}", load_file(directory / "model.safetensors")
    head_weight = tensors.get(f"{prefix}.shared_head.head.weight", target.head_weight)
    norm_E = tensors[f"{prefix}.shared_head.norm.weight"]
    return Known(
        method="mtp",
        target=target,
        directory=None,
        inputs=lambda states: states[-1],
        forward=lambda hidden_TE, embeddings: heads.mtp(
            tensors, target.reference.config, prefix, hidden_TE, embeddings
        ),
        output=lambda x_TE: heads.rms_norm(x_TE, norm_E, target.loaded.config.rms_norm_eps) @ head_weight.T,
    )
