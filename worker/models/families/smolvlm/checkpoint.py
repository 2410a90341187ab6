"""Reads the files of Idefics3 and SmolVLM, under the names of the language model's family."""

from worker.encoders.vision_files import VisionFiles


class SmolVLMFiles(VisionFiles):
    prefixes = (
        ("model.text_model.", "model."),
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    )
    flattened = ("vision_model.embeddings.patch_embedding.weight",)
