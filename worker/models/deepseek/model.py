"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): multi-head latent attention, and mixtures of many small
experts beside one that computes every token.

The layers with which V3 predicts tokens further ahead are left out.
"""

from kernels.backend import Backend
from worker.layers.experts.mixture import ExpertNames
from worker.layers.latent_attention import LatentAttention
from worker.model_config import ModelConfig
from worker.models.decoder import Layer
from worker.models.llama.model import linear_shapes
from worker.models.mixtral.model import MixtralModel
from worker.weights.reader import Shape, WeightReader


class DeepseekModel(MixtralModel):
    mixture = "mlp"
    names = ExpertNames()

    @classmethod
    def attention(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        prefix = f"model.layers.{layer}"
        return LatentAttention(
            config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", take=take, path=path
        )

    @classmethod
    def attention_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        latent, hidden, prefix = config.latent, config.hidden_size, f"model.layers.{layer}.self_attn"
        assert latent is not None
        queries, values = config.num_heads * latent.head_size, config.num_heads * latent.value_size
        sizes = {  # inputs, outputs
            "kv_a_proj_with_mqa": (hidden, latent.entry_size),
            "kv_b_proj": (latent.latent_size, config.num_heads * latent.nope_size + values),
            "o_proj": (values, hidden),
        }
        norms = {"kv_a_layernorm": latent.latent_size}
        if latent.query_rank is None:
            sizes["q_proj"] = (hidden, queries)
        else:
            sizes |= {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, queries)}
            norms["q_a_layernorm"] = latent.query_rank
        shapes = linear_shapes({f"{prefix}.{name}": (*size, False) for name, size in sizes.items()})
        return shapes | {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
