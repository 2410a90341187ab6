"""Where a request is resolved: the model that is served, and what turns text into its tokens. A router's is shared with
other requests and other processes' replicas; that of an LLM is in its own process."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from protos.inference_pb2 import ChatPrompt, Constraint, ModelInfo
from router.request.outputs import Outputs
from router.text.tokenizer import Tokenizer


class Model(Protocol):
    """The served model."""

    @property
    def name(self) -> str:
        """Its served_model_name."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Raises NoReplica at a router that has no replica yet."""
        ...

    @property
    def media_json(self) -> str:
        """ModelInfo.media_json; empty: it takes no images and videos."""
        ...

    @property
    def max_logprobs(self) -> int:
        """Most logprobs beside a token."""
        ...


class Encoder(Protocol):
    """Tokenizes. All calls raise TooManyTokensError for more than most_tokens, and RequestError."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def encode(self, text: str, most_tokens: int, *, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_fill_in(
        self, prefix: str, suffix: str, most_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]: ...

    async def encode_chat(self, chat: ChatPrompt, most_tokens: int, *, add_special_tokens: bool = False) -> list[int]:
        """Raises TemplateError, too."""
        ...

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[list[int]]]: ...


class Text(Protocol):
    """Turns text into the model's tokens, and back."""

    @property
    def encoder(self) -> Encoder: ...

    @property
    def outputs(self) -> Outputs: ...

    @property
    def trusts_templates(self) -> bool:
        """A request may bring its own chat template."""
        ...

    def canonical(self, constraint: Constraint, model: ModelInfo) -> Awaitable[Constraint]:
        """Returns the canonical form. Raises InvalidConstraint, and MissingFeature if none can be compiled here."""
        ...
