"""How checkpoints name what a mixture of experts is made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Of a mixture's tensors, below its prefix, without ".weight"."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # Of the expert of all tokens, if there is one.
    shared: str = "shared_experts"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Of one expert: gate, up, down."""
        gate, up, down = (f"experts.{expert}.{name}" for name in (self.gate, self.up, self.down))
        return gate, up, down
