"""The peers that serve over HTTP, with the settings of engines.py.

OpenVINO GenAI has no server of its own: the one that embeds it, OpenVINO Model Server, is not a Python package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.directory import peer_directory
from benchmarks.peers.engines import (
    LLAMA_CPP_SCRIPT,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    has_bf16_instructions,
    llama_cpp_flags,
    vllm_environment,
)
from benchmarks.peers.http_client import Api
from benchmarks.peers.prepare_models import HUGGING_FACE, model_path
from worker.weights.quantization.kinds import Quantization

SERVERS = ("vllm", "llama-server")
MAX_MODEL_LEN = 2048
# Tokens that a slot of llama-server holds: a request of 128 in, 128 out.
_SLOT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """A peer's server. command: without the port, appended as --port N. program: exists once `installed_by` has run."""

    server: str
    # Format of the weights: a dtype, or a GGUF type.
    form: str
    command: tuple[str, ...]
    api: Api
    program: Path
    installed_by: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.server}:{self.form}"


def servers(quantization: Quantization, threads: int) -> list[ServerSpec]:
    """The servers of one class of precision."""
    if quantization == "int8":
        return [_llama_server("Q8_0", threads)]
    if quantization == "int4":
        return [_llama_server("Q4_0", threads)]
    return [_vllm("bfloat16" if has_bf16_instructions() else "float32", threads), _llama_server("BF16", threads)]


def _vllm(form: str, threads: int) -> ServerSpec:
    programs = peer_directory("vllm") / "bin"
    return ServerSpec(
        server="vllm",
        form=form,
        command=(
            *(str(programs / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model_path(HUGGING_FACE))),
            *("--served-model-name", "model", "--dtype", form, "--max-model-len", str(MAX_MODEL_LEN)),
            *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
            *("--host", "127.0.0.1"),
        ),
        api=Api(path="/v1/completions", body=_vllm_body, tokens_after=_vllm_tokens),
        environment=vllm_environment(threads),
        program=programs / "python",
        installed_by="benchmarks/peers/install_vllm.sh",
    )


def _vllm_body(prompt: Sequence[int], output: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _vllm_tokens(event: Mapping[str, Any], before: int) -> int:
    return before + sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def _llama_server(form: str, threads: int) -> ServerSpec:
    program = peer_directory("llama_cpp") / "bin" / "llama-server"
    return ServerSpec(
        server="llama-server",
        form=form,
        command=(
            *(str(program), "-m", str(model_path(form)), "-t", str(threads), "-tb", str(threads)),
            *("-np", str(MAX_NUM_SEQS), "-c", str(MAX_NUM_SEQS * _SLOT), "-b", "2048", "-ub", "512"),
            *llama_cpp_flags(),
        ),
        api=Api(path="/completion", body=_llama_body, tokens_after=_llama_tokens),
        program=program,
        installed_by=LLAMA_CPP_SCRIPT,
    )


def _llama_body(prompt: Sequence[int], output: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


def _llama_tokens(event: Mapping[str, Any], before: int) -> int:
    # A token that is part of a character comes with the next event that has text.
    return event["tokens_predicted"]
