"""The clients: what each needs in its environment, and the program that tries it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).with_name("programs")
# The build of PyTorch that Octavo itself runs on a CPU; pip prefers a CPU build where an index has one.
_TORCH = "torch==2.13.0"
# The AI SDK needs Node 22, which Debian 12 does not have.
_NODE = "node@22"


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client. kind: how its environment is made. packages: as pip or npm understands them; the version shown is
    that of the first one."""

    name: str
    title: str
    program: str
    packages: tuple[str, ...]
    kind: Literal["pip", "npm", "vllm"] = "pip"

    @property
    def shown_package(self) -> str:
        """The name of the first package, without extras and versions."""
        first = self.packages[0]
        if self.kind == "npm":
            return first[: first.index("@", 1)]
        return first.partition(">")[0].partition("[")[0]


CLIENTS = (
    Client(name="openai", title="openai (Python)", program="openai_sdk.py", packages=("openai>=3,<4",)),
    Client(name="anthropic", title="anthropic (Python)", program="anthropic_sdk.py", packages=("anthropic>=2,<3",)),
    Client(
        name="langchain",
        title="LangChain, langchain-openai",
        program="langchain_sdk.py",
        packages=("langchain-openai>=1.7,<2", "langchain>=1.4,<2"),
    ),
    Client(name="instructor", title="instructor", program="instructor_sdk.py", packages=("instructor>=1.17,<2",)),
    # LiteLLM imports mcp for responses and for calls that are forced, and does not require it.
    Client(name="litellm", title="LiteLLM", program="litellm_sdk.py", packages=("litellm>=1.100,<2", "mcp")),
    Client(
        name="llama_index",
        title="LlamaIndex, llama-index-llms-openai-like",
        program="llama_index_sdk.py",
        packages=("llama-index-llms-openai-like>=0.8,<0.9",),
    ),
    Client(name="guidellm", title="guidellm", program="guidellm_cli.py", packages=("guidellm>=0.8,<0.9", _TORCH)),
    Client(name="vllm", title="vLLM", program="vllm_cli.py", packages=("vllm",), kind="vllm"),
    Client(
        name="lm_eval",
        title="lm-eval",
        program="lm_eval_cli.py",
        packages=("lm-eval[api]>=0.4.13,<0.5", "transformers>=5.17,<6"),
    ),
    Client(
        name="ai_sdk",
        title="Vercel's AI SDK, ai (npm)",
        program="ai_sdk.mjs",
        kind="npm",
        packages=("ai@7", "@ai-sdk/openai-compatible@3", "zod@4", _NODE),
    ),
    Client(
        name="openai_npm",
        title="openai (npm)",
        program="openai_npm.mjs",
        kind="npm",
        packages=("openai@7", "zod@4", _NODE),
    ),
)
