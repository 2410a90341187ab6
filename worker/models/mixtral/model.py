"""The llama family with mixtures of experts: Mixtral (arXiv 2401.04088), Qwen3-MoE (arXiv 2505.09388)."""

from kernels.backend import Backend
from worker.layers.experts.mixture import ExpertNames, MixtureOfExperts
from worker.model_config import ModelConfig
from worker.models.decoder import Layer
from worker.models.llama.model import LlamaModel
from worker.weights.reader import Shape, WeightReader


class MixtralModel(LlamaModel):
    """What lies in a layer's place of the MLP, where config.experts says that there is a mixture."""

    mixture = "block_sparse_moe"
    names = ExpertNames(gate="w1", up="w3", down="w2")

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        assert config.experts is not None
        if not config.experts.layers[layer]:
            return super().mlp(config, layer, take, path)
        prefix = f"model.layers.{layer}"
        return MixtureOfExperts(
            config,
            f"{prefix}.{cls.mixture}",
            norm=f"{prefix}.post_attention_layernorm",
            names=cls.names,
            take=take,
            path=path,
        )

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        experts, hidden_size = config.experts, config.hidden_size
        assert experts is not None
        if not experts.layers[layer]:
            return super().mlp_shapes(config, layer)
        prefix, size = f"model.layers.{layer}.{cls.mixture}", experts.intermediate_size
        shapes: dict[str, Shape] = {f"{prefix}.{cls.names.router}.weight": (experts.num_experts, hidden_size)}
        for expert in range(experts.num_experts):
            gate, up, down = cls.names.tensors(expert)
            shapes |= {
                f"{prefix}.{gate}.weight": (size, hidden_size),
                f"{prefix}.{up}.weight": (size, hidden_size),
                f"{prefix}.{down}.weight": (hidden_size, size),
            }
        if experts.has_bias:
            shapes[f"{prefix}.{cls.names.router}.e_score_correction_bias"] = (experts.num_experts,)
        if ffn := experts.shared_intermediate_size:
            sizes = {"gate_proj": (ffn, hidden_size), "up_proj": (ffn, hidden_size), "down_proj": (hidden_size, ffn)}
            shapes |= {f"{prefix}.{cls.names.shared}.{name}.weight": size for name, size in sizes.items()}
        return shapes


class Qwen3MoeModel(MixtralModel):
    mixture = "mlp"
    names = ExpertNames()
