"""The served model and its text, as a router's requests see them (router.request.served)."""

from collections.abc import Awaitable
from dataclasses import dataclass

from protos.inference_pb2 import Constraint, ModelInfo
from router.errors import NoReplica
from router.intake.constraints import Constraints
from router.replicas.replica_set import ReplicaSet
from router.request.outputs import Outputs
from router.text.tokenizer_pool import TokenizerPool


class ServedModel:
    """The model of the replicas, as far as they have told."""

    def __init__(self, name: str, replicas: ReplicaSet) -> None:
        """name: served_model_name."""
        self.name = name
        self._replicas = replicas

    @property
    def info(self) -> ModelInfo:
        """Raises NoReplica."""
        model = self._replicas.model
        if model is None:
            raise NoReplica(f"no replica is ready: {self._replicas.describe()}; try again in a few seconds")
        return model

    @property
    def max_model_len(self) -> int:
        """0: not known yet."""
        model = self._replicas.model
        return 0 if model is None else model.max_model_len

    @property
    def media_json(self) -> str:
        """ModelInfo's of a replica that takes items; empty: there is none."""
        return self._replicas.media_json

    @property
    def max_logprobs(self) -> int:
        """The highest that a replica allows."""
        return self._replicas.max_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterText:
    """Tokenizes and compiles beside the event loop, callers in turn."""

    encoder: TokenizerPool
    outputs: Outputs
    constraints: Constraints
    # Option trust_request_chat_template.
    trusts_templates: bool = False

    def canonical(self, constraint: Constraint, model: ModelInfo) -> Awaitable[Constraint]:
        """Raises InvalidConstraint, MissingFeature."""
        return self.constraints.canonical(constraint, model)
