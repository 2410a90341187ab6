"""Reads the files of Qwen2-VL and Qwen2.5-VL, under the names of the language model's family."""

from worker.encoders.vision_files import VisionFiles


class QwenVLFiles(VisionFiles):
    # Since version 4.52 transformers reads and writes the first names; the published files have the second ones.
    prefixes = (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    )
    split = ((".attn.qkv.", (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.")),)
    flattened = ("visual.patch_embed.proj.weight",)
