"""Weights: from safetensors or GGUF files, or random ones, to packed tensors. Never from pickled files."""

from worker.weights.errors import WeightsError
from worker.weights.loader import LoadedModel, load_model
from worker.weights.weight_cache import open_weight_cache

__all__ = ["LoadedModel", "WeightsError", "load_model", "open_weight_cache"]
