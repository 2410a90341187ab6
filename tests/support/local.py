"""The inside of an LLM."""

from octavo import LLM
from octavo.local.engine import Engine
from octavo.local.in_process import InProcess


def engine_of(llm: LLM) -> Engine:
    """The engine of an LLM without workers."""
    assert isinstance(llm._computes, InProcess)
    return llm._computes._engine
