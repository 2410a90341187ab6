"""Octavo: serves large language models over gRPC.

    from octavo import Client, SamplingParams

    with Client("localhost:50051") as client:
        print(client.chat("What is the capital of France?", SamplingParams(temperature=0)).text)

Names are imported when first used: `import octavo` loads neither grpc nor torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.client.async_client import AsyncClient, AsyncGenerationStream
    from octavo.client.connection import tls_credentials
    from octavo.client.constraints import Constraint
    from octavo.client.errors import (
        AccessDenied,
        Cancelled,
        DeadlineExceeded,
        DuplicateRequest,
        InvalidRequest,
        ModelNotFound,
        OctavoError,
        Overloaded,
        ProtocolError,
        RequestNotFound,
        ServerError,
        Superseded,
        Unavailable,
    )
    from octavo.client.media import Video
    from octavo.client.requests import RepetitionDetection, SamplingParams
    from octavo.client.results import (
        Choice,
        Delta,
        Finished,
        FinishReason,
        Generation,
        Logprob,
        ModelInfo,
        PositionLogprobs,
        PromptScored,
        Started,
        StreamEvent,
        Tokenized,
        Usage,
    )
    from octavo.client.sync_client import Client, GenerationStream
    from octavo.client.tools import Tool, ToolCall, ToolCallPiece
    from octavo.local import CompilationConfig, CompilationLevel, CompilationMode, CUDAGraphMode
    from octavo.local.async_llm import AsyncLLM
    from octavo.local.llm import LLM

_MODULES = {
    "octavo.local": ("CUDAGraphMode", "CompilationConfig", "CompilationLevel", "CompilationMode"),
    "octavo.client.async_client": ("AsyncClient", "AsyncGenerationStream"),
    "octavo.client.sync_client": ("Client", "GenerationStream"),
    "octavo.client.tools": ("Tool", "ToolCall", "ToolCallPiece"),
    "octavo.client.connection": ("tls_credentials",),
    "octavo.client.constraints": ("Constraint",),
    "octavo.client.errors": (
        "AccessDenied",
        "Cancelled",
        "DeadlineExceeded",
        "DuplicateRequest",
        "InvalidRequest",
        "ModelNotFound",
        "OctavoError",
        "Overloaded",
        "ProtocolError",
        "RequestNotFound",
        "ServerError",
        "Superseded",
        "Unavailable",
    ),
    "octavo.local.llm": ("LLM",),
    "octavo.local.async_llm": ("AsyncLLM",),
    "octavo.client.results": (
        "Choice",
        "Delta",
        "FinishReason",
        "Finished",
        "Generation",
        "Logprob",
        "ModelInfo",
        "PositionLogprobs",
        "PromptScored",
        "Started",
        "StreamEvent",
        "Tokenized",
        "Usage",
    ),
    "octavo.client.requests": ("RepetitionDetection", "SamplingParams"),
    "octavo.client.media": ("Video",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LLM",
    "AccessDenied",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncLLM",
    "CUDAGraphMode",
    "Cancelled",
    "Choice",
    "Client",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "Constraint",
    "DeadlineExceeded",
    "Delta",
    "DuplicateRequest",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationStream",
    "InvalidRequest",
    "Logprob",
    "ModelInfo",
    "ModelNotFound",
    "OctavoError",
    "Overloaded",
    "PositionLogprobs",
    "PromptScored",
    "ProtocolError",
    "RepetitionDetection",
    "RequestNotFound",
    "SamplingParams",
    "ServerError",
    "Started",
    "StreamEvent",
    "Superseded",
    "Tokenized",
    "Tool",
    "ToolCall",
    "ToolCallPiece",
    "Unavailable",
    "Usage",
    "Video",
    "tls_credentials",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    path = _MODULE_OF[name]
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        # octavo-client has the modules of octavo.client alone.
        if error.name is None or path.startswith("octavo.client") or not path.startswith(error.name):
            raise
        raise ImportError(f"octavo.{name} is not in octavo-client: install octavo") from None
    return getattr(module, name)
