"""Octavo and its peers as processes that speak engine_protocol, with the settings that suited each best."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from benchmarks.peers.directory import peer_directory
from benchmarks.peers.prepare_models import HUGGING_FACE, model_path
from worker.weights.quantization.kinds import Quantization

RUNNERS = Path(__file__).resolve().parent / "runners"
PEERS = ("vllm", "llama.cpp", "openvino", "transformers")
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
# The most concurrent requests of the benchmarks, and the token budget of a step: 16 prompts of 128 tokens fill it.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 2048
OCTAVO = "octavo"
# llama.cpp's llama-quantize makes the files for OpenVINO, too.
LLAMA_CPP_SCRIPT = "benchmarks/peers/install_llama_cpp.sh"

VLLM_ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    engine: str
    # Format of the weights: a dtype, or a GGUF type.
    form: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # Exists once `installed_by` has run.
    program: Path
    installed_by: str
    # The file or directory that prepare_models.py makes for it; None if it needs none.
    model: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.form}"

    @property
    def to_install(self) -> str | None:
        """The script that makes what is missing; None if nothing is."""
        if not self.program.exists():
            return self.installed_by
        return None if self.model is None or self.model.exists() else LLAMA_CPP_SCRIPT


def _cpu_flags() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text().split())


def has_bf16_instructions() -> bool:
    return "avx512_bf16" in _cpu_flags()


def llama_cpp_flags() -> tuple[str, ...]:
    """Turns llama.cpp's AMX kernels off where the CPU has AMX: those of release 0.3.36 ended with SIGILL. They need
    reordered weights."""
    return ("--no-repack",) if "amx_int8" in _cpu_flags() else ()


def vllm_environment(threads: int) -> dict[str, str]:
    """Binds vLLM to all of its cores; otherwise it would reserve one."""
    return {**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0"}


def octavo_engine(
    quantization: Quantization, dtype: str, threads: int, *, context: tuple[Path, int] | None = None
) -> EngineSpec:
    """context: a model for longer contexts, and their length. KV memory is allocated at the start, not
    by the prompts that first use it."""
    options = {
        "dtype": dtype,
        "quantization": quantization,
        "worker_threads": threads,
        "populate_kv_cache": True,
    }
    if context is not None:
        options |= {"model": str(context[0]), "max_model_len": context[1]}
    return EngineSpec(
        engine=OCTAVO,
        form=dtype if quantization == "none" else quantization,
        command=(sys.executable, str(RUNNERS / "octavo_engine.py"), json.dumps(options)),
        program=Path(sys.executable),
        installed_by="make install",
    )


def peer_engines(quantization: Quantization, threads: int, wanted: Sequence[str]) -> list[EngineSpec]:
    """The wanted peers of one class of precision. wanted: peers ("vllm"), in the forms that suit this CPU, or peers in
    one form ("vllm:bfloat16"), whether it suits this CPU or not."""
    specs = _all(quantization, threads)
    slow = set() if has_bf16_instructions() else {"vllm:bfloat16", "transformers:bfloat16"}
    return [spec for spec in specs if spec.name in wanted or (spec.engine in wanted and spec.name not in slow)]


def _all(quantization: Quantization, threads: int) -> list[EngineSpec]:
    if quantization == "int8":
        return [_llama_cpp("Q8_0", threads), _openvino("Q8_0", threads)]
    if quantization == "int4":
        forms = ("Q4_0", "Q4_1")
        return [*(_llama_cpp(form, threads) for form in forms), *(_openvino(form, threads) for form in forms)]
    return [
        *(_vllm(form, threads) for form in ("bfloat16", "float32")),
        *(_llama_cpp(form, threads) for form in ("BF16", "F16")),
        _openvino("F16", threads),
        *(_transformers(form, threads) for form in ("bfloat16", "float32")),
    ]


def _vllm(form: str, threads: int) -> EngineSpec:
    settings = {
        "dtype": form,
        "max_model_len": 2048,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": True,
    }
    python = peer_directory("vllm") / "bin" / "python"
    return EngineSpec(
        engine="vllm",
        form=form,
        command=(str(python), str(RUNNERS / "vllm_engine.py"), str(model_path(HUGGING_FACE)), json.dumps(settings)),
        environment=vllm_environment(threads),
        program=python,
        installed_by="benchmarks/peers/install_vllm.sh",
        model=model_path(HUGGING_FACE),
    )


def _llama_cpp(form: str, threads: int) -> EngineSpec:
    settings = {"threads": threads, "batch": 2048, "ubatch": 512, "flags": llama_cpp_flags()}
    programs = peer_directory("llama_cpp") / "bin"
    return EngineSpec(
        engine="llama.cpp",
        form=form,
        command=(
            *(sys.executable, str(RUNNERS / "llama_cpp_engine.py"), str(programs)),
            *(str(model_path(form)), json.dumps(settings)),
        ),
        program=programs / "llama-batched-bench",
        installed_by=LLAMA_CPP_SCRIPT,
        model=model_path(form),
    )


def _openvino(form: str, threads: int) -> EngineSpec:
    settings = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "cache_size": 2,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
        "properties": {"INFERENCE_NUM_THREADS": threads},
    }
    python = peer_directory("openvino") / "bin" / "python"
    return EngineSpec(
        engine="openvino",
        form=form,
        command=(str(python), str(RUNNERS / "openvino_engine.py"), str(model_path(form)), json.dumps(settings)),
        program=python,
        installed_by="benchmarks/peers/install_openvino.sh",
        model=model_path(form),
    )


def _transformers(form: str, threads: int) -> EngineSpec:
    settings = {"dtype": form, "threads": threads}
    return EngineSpec(
        engine="transformers",
        form=form,
        command=(
            *(sys.executable, str(RUNNERS / "transformers_engine.py")),
            *(str(model_path(HUGGING_FACE)), json.dumps(settings)),
        ),
        program=Path(sys.executable),
        installed_by="make install",
        model=model_path(HUGGING_FACE),
    )
