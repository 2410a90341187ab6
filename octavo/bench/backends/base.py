"""The interface of a backend: its requests, and the measurements that it returns."""

from dataclasses import dataclass
from typing import Protocol, Self

from octavo.reports import RequestTrace

# Token ids, or text.
Prompt = list[int] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model behind a server. Empty, or 0: the server does not tell."""

    engine: str
    name: str
    dtype: str = ""
    max_model_len: int = 0
    vocab_size: int = 0


class Backend(Protocol):
    """One server. Use as a context manager."""

    # Prompts are text, of which only the server knows the tokens.
    takes_text: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of a prompt as the server counted them, the mean; 0: it did not say."""
        ...

    @property
    def told(self) -> dict[str, object]:
        """More keys for the report."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def served(self) -> Served:
        """Asks for the model. Raises OctavoError."""
        ...

    async def complete(self, prompt: Prompt, seed: int, output_len: int) -> RequestTrace:
        """Sends a greedy request and reads its output. A failure is in the trace."""
        ...
