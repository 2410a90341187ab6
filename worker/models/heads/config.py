"""Describes a drafting head as data, reads it from a speculator's config.json, and checks that it fits its target."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kernels.shard import ALL_LAYERS, Stage
from worker.model_config import ModelConfig
from worker.models.config import config_from_json, read_json

HeadMethod = Literal["eagle", "eagle3", "mtp"]
HEAD_METHODS: tuple[HeadMethod, ...] = get_args(HeadMethod)
# The architectures in the config.json of speculators that vLLM and SGLang load, and in that of EAGLE's authors, who
# name the target's. All of them are layers of the llama family.
_ARCHITECTURES: dict[HeadMethod, tuple[str, ...]] = {
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EAGLEModel", "LlamaForCausalLM"),
    "eagle3": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator", "LlamaForCausalLM"),
}
# The objects within config.json in which some speculators keep the fields of their layers.
_NESTED = ("model", "transformer_layer_config")
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# The low, the middle and the high state, which fc makes one.
_NUM_AUX_STATES = 3
# Fields that would change the forward pass.
_UNSUPPORTED = ("add_para_norm", "parallel_drafting")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: a few layers that predict the token after the next one from a target's hidden states.

    layers: the head's own layers as a model, numbered from 0. target: the model whose tokens it drafts. kept_layers:
    the target's layers before which it reads the hidden states; empty: it reads the last norm's result.
    """

    method: HeadMethod
    layers: ModelConfig
    target: ModelConfig
    kept_layers: tuple[int, ...] = ()
    # The entries of its output head; fewer than the vocabulary's if the checkpoint maps them to token ids.
    draft_vocab_size: int
    # The norm of the hidden states comes before the residual stream branches off, not after.
    norm_before_residual: bool = False

    @property
    def hidden_size(self) -> int:
        """The size of the states that the head takes from one position to the next."""
        return self.layers.hidden_size

    @property
    def mtp_prefix(self) -> str:
        """The name of a DeepSeek checkpoint's layer for multi-token prediction."""
        return f"model.layers.{self.target.num_layers}"


def head_config(
    method: HeadMethod, directory: Path | None, target: ModelConfig, stage: Stage = ALL_LAYERS
) -> HeadConfig:
    """Reads the config of the head that drafts for `target`, without its weights. directory: of the speculator; None
    for mtp. stage: the target's last one.

    Raises ValueError, naming the file and the field, for a head that does not fit.
    """
    if method == "mtp":
        return _mtp(target)
    assert directory is not None
    file = directory / "config.json"
    try:
        config = _eagle(method, read_json(file), target)
    except KeyError as error:
        raise ValueError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{file}: {error}") from None
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(file)) else f"{file}: {message}") from None
    _check_stage(config, stage)
    return config


def _mtp(target: ModelConfig) -> HeadConfig:
    if target.num_mtp_layers != 1:
        raise ValueError(
            f"method=mtp needs a checkpoint with one layer for multi-token prediction; this {target.architecture} has "
            f"{target.num_mtp_layers} (num_nextn_predict_layers): use another method"
        )
    experts = target.experts
    if experts is not None:
        # The layer is like the last one before it.
        experts = replace(experts, layers=experts.layers[-1:])
    layers = replace(
        target,
        num_layers=1,
        layer_windows=(0,),
        experts=experts,
        num_mtp_layers=0,
        left_out=(),
        tie_word_embeddings=False,
    )
    return HeadConfig(method="mtp", layers=layers, target=target, draft_vocab_size=target.vocab_size)


def _eagle(method: HeadMethod, raw: Mapping[str, Any], target: ModelConfig) -> HeadConfig:
    architecture = (raw.get("architectures") or ["(none named)"])[0]
    if architecture not in _ARCHITECTURES[method]:
        raise ValueError(
            f"architecture {architecture!r} is no head for method={method}; {', '.join(_ARCHITECTURES[method])} are"
        )
    raw = _flat(raw)
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise ValueError(f"{name}={raw[name]!r} is not supported")
    layers = config_from_json({"tie_word_embeddings": False, **raw, "architectures": ["LlamaForCausalLM"]})
    settings = raw.get("eagle_config") or {}
    reads_layers = method == "eagle3" and bool(settings.get("use_aux_hidden_state", True))
    config = HeadConfig(
        method=method,
        layers=layers,
        target=target,
        kept_layers=_kept_layers(raw, settings, target) if reads_layers else (),
        draft_vocab_size=int(raw.get("draft_vocab_size") or layers.vocab_size),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )
    _check_sizes(config, int(raw.get("target_hidden_size") or layers.hidden_size))
    return config


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with those of a nested object among them."""
    flat: dict[str, Any] = {}
    for name in _NESTED:
        if isinstance(raw.get(name), Mapping):
            flat |= raw[name]
    return flat | {name: value for name, value in raw.items() if name not in _NESTED}


def _kept_layers(raw: Mapping[str, Any], settings: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Returns the layers before which the states are read, in ascending order; 0: the embeddings. Without a list in
    the config they are the third, the middle one and the third last, as in vLLM."""
    count = target.num_layers
    given = raw.get(_AUX_LAYERS) or settings.get(_AUX_LAYERS) or (2, count // 2, count - 3)
    layers = tuple(sorted({int(layer) for layer in given}))
    if len(layers) != _NUM_AUX_STATES or layers[0] < 0 or layers[-1] > count:
        raise ValueError(
            f"{_AUX_LAYERS}={list(given)}: {_NUM_AUX_STATES} different numbers from 0 to {count} are expected, the "
            "target's layers"
        )
    return layers


def _check_sizes(config: HeadConfig, target_hidden_size: int) -> None:
    """Compares the head with its target."""
    layers, target = config.layers, config.target
    if target.residual_multiplier != 1:
        raise ValueError(
            f"method={config.method} is not supported for models with a residual_multiplier ({target.architecture}): "
            "use method=draft_model or ngram"
        )
    if target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the head reads hidden states of {target_hidden_size} numbers; the model's have {target.hidden_size}: it "
            "was made for another model"
        )
    if config.method == "eagle" and layers.hidden_size != target.hidden_size:
        raise ValueError(
            f"hidden_size={layers.hidden_size}: the model's is {target.hidden_size}, and its output head reads the "
            "head's states"
        )
    if layers.vocab_size != target.vocab_size:
        raise ValueError(f"vocab_size={layers.vocab_size}: the model's is {target.vocab_size}; they must be equal")
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise ValueError(
            f"draft_vocab_size={config.draft_vocab_size}: 1 to {target.vocab_size} (all tokens) are expected"
        )
    if config.method == "eagle" and config.draft_vocab_size != target.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size}: heads for method=eagle draft from all tokens")


def _check_stage(config: HeadConfig, stage: Stage) -> None:
    first = stage.layers(config.target.num_layers).start
    elsewhere = [layer for layer in config.kept_layers if layer < first]
    if elsewhere:
        raise ValueError(
            f"method=eagle3 reads the hidden states before layers {_listed(config.kept_layers)}, and "
            f"pipeline_parallel_size={stage.size} leaves those before {_listed(elsewhere)} to another stage: use "
            "pipeline_parallel_size=1 or another method"
        )


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
