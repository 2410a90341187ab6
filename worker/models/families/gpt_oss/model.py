"""gpt-oss (arXiv 2508.10925): attention with sinks, a window on every other layer, and mixtures whose router and
experts have biases."""

from worker.layers.experts.mixture import ExpertNames
from worker.models.families.mixtral.model import MixtralModel


class GptOssModel(MixtralModel):
    mlp = "mlp"
    names = ExpertNames(router="router")
