"""The inside of an LLM, and chats for one."""

from octavo import LLM
from octavo.local.engine import Engine
from octavo.local.in_process import InProcess


def engine_of(llm: LLM) -> Engine:
    """The engine of an LLM without workers."""
    assert isinstance(llm._computes, InProcess)
    return llm._computes._engine


TEXT = (
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    "    return width * height * depth\n\n\ndef surface(width, height, depth):\n"
)
CHATS = [
    [{"role": "user", "content": f"Repeat this code exactly, and nothing else:\n\n{TEXT}"}],
    [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    [{"role": "user", "content": f"Add a docstring to each function:\n\n{TEXT}"}],
]
