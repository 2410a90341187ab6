"""GLM-4 of 2025 (zai-org/GLM-4-0414): a Gemma 3 block under other names. Attention and MLP norm what they read and what
they add; rope rotates half of each head; files store gate and up as one layer."""

from worker.models.families.gemma3.model import Gemma3Model


class Glm4Model(Gemma3Model):
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
