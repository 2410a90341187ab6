"""Tokens per expert: counting them, and showing them in /metrics."""

import torch
from prometheus_client import CollectorRegistry, generate_latest

from worker.layers.forward_context import ExpertLoad
from worker.model_config import ExpertsConfig
from worker.process.expert_metrics import ExpertMetrics


def _load(num_experts: int, layers: tuple[bool, ...]) -> ExpertLoad:
    config = ExpertsConfig(
        num_experts=num_experts, num_experts_per_token=1, intermediate_size=8, renormalize=True, layers=layers
    )
    return ExpertLoad(config, range(len(layers)))


def _metrics(load: ExpertLoad) -> str:
    registry = CollectorRegistry()
    registry.register(ExpertMetrics(load))
    return generate_latest(registry).decode()


def test_tokens_are_counted_by_layer_and_expert() -> None:
    load = _load(3, (False, True))
    load.count(1, torch.tensor([[2, 0], [2, -1]]))
    load.count(1, torch.tensor([2]))
    shown = _metrics(load)
    assert 'octavo_expert_tokens_total{expert="0",layer="1"} 1.0' in shown
    assert 'octavo_expert_tokens_total{expert="1",layer="1"} 0.0' in shown
    assert 'octavo_expert_tokens_total{expert="2",layer="1"} 3.0' in shown
    assert 'octavo_expert_imbalance{layer="1"} 2.25' in shown
    assert 'layer="0"' not in shown


def test_a_model_with_very_many_experts_does_not_flood_who_scrapes() -> None:
    load = _load(256, (True,) * 58)
    for layer in range(58):
        load.count(layer, torch.tensor([7]))
    lines = [line for line in _metrics(load).splitlines() if line.startswith("octavo_expert_tokens_total{")]
    assert len(lines) == 256
    assert 'octavo_expert_tokens_total{expert="7",layer="all"} 58.0' in lines
