"""Experts on several ranks: which way tokens take to them."""

from collections.abc import Sequence

from configs.options import Options
from worker.errors import PermanentError
from worker.model_config import ModelConfig
from worker.parallel.expert_all_to_all import AllToAllExchange
from worker.parallel.expert_exchange import ExpertExchange
from worker.parallel.expert_gather import GatherExchange
from worker.parallel.groups import Groups

# Of all replicas. A gather is a call less, or two, and sends what nobody needs: hidden size 2048, 8 of 64 experts, over
# loopback, 2 x 2 ranks on 2 cores: 6.2 ms against 9.3 with 16 tokens, 9.7 against 9.2 with 32, 39 against 25 with 256.
GATHERED_TOKENS = 32


def check_experts(options: Options, config: ModelConfig) -> None:
    """Raises PermanentError if ranks are to share experts that the model does not have."""
    if options.enable_expert_parallel and config.experts is None:
        raise PermanentError(
            f"enable_expert_parallel: a {config.architecture} has no experts that ranks could share; leave it out"
        )


def exchange_for(groups: Groups, num_tokens_D: Sequence[int]) -> ExpertExchange:
    """num_tokens_D: tokens of the step at each replica, by which all ranks choose alike."""
    cls = GatherExchange if sum(num_tokens_D) <= GATHERED_TOKENS else AllToAllExchange
    return cls(groups, num_tokens_D)
