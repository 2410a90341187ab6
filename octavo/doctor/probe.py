"""Reads what needs PyTorch, in a process of its own: `python -m octavo.doctor.probe`.

PyTorch takes a second to import, and where it is broken it may raise, hang or end its process. The options come as JSON
on stdin. Each reading is one line on stdout as soon as it is made, so a crash costs only the readings after it.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from configs.groups.speculation import SAME_MODEL
from configs.options import Options
from configs.quantization import KINDS, offered
from runtime.model_files import PACKAGE_PREFIX, ModelFiles, ModelNotFoundError, resolve_model

if TYPE_CHECKING:
    import torch

    from worker.model_config import ModelConfig


class GpuFacts(BaseModel):
    """A GPU that PyTorch sees. capability: such as "9.0"."""

    name: str
    capability: str


class TorchFacts(BaseModel):
    """cuda: the version that PyTorch was built for; None for a CPU build. gpu_error: why it finds no GPU."""

    cuda: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_error: str = ""


class ModelFacts(BaseModel):
    """The model that the options name, in bytes of one replica. block_bytes: of a KV block at one worker."""

    name: str
    quantization: str
    weight_bytes: int
    block_bytes: int
    # Tokens of a block.
    block_size: int
    context: int
    # The draft model of a replica; block_bytes include its KV.
    draft_bytes: int = 0


class Reading(BaseModel):
    """The answer of one reader; error: why there is none."""

    reader: str
    error: str = ""
    torch: TorchFacts | None = None
    # The name of the kernels in use on a CPU; empty: PyTorch's.
    kernels: str | None = None
    # Why workers refuse the options; empty: they do not.
    refusal: str | None = None
    model: ModelFacts | None = None


def read_torch(options: Options) -> Reading:
    import torch

    facts = TorchFacts(cuda=torch.version.cuda)
    if facts.cuda is not None and options.device != "cpu":
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            facts.gpu_error = str(error).strip()
        else:
            devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            facts.gpus = tuple(GpuFacts(name=each.name, capability=f"{each.major}.{each.minor}") for each in devices)
    return Reading(reader="torch", torch=facts)


def read_kernels(options: Options) -> Reading:
    """Runs the kernels' own checks, on a CPU."""
    if _on_gpu(options):
        return Reading(reader="kernels", kernels="")
    from kernels.cpu_backend import native_kernels

    kernels = native_kernels()
    return Reading(reader="kernels", kernels="" if kernels is None else kernels.path.name)


def read_refusal(options: Options) -> Reading:
    """Asks workers' own checks for what they would refuse."""
    import torch

    from worker.cpu.threads import prepare_threads
    from worker.device.select import Gpu, check_gpu, gpu_index
    from worker.errors import PermanentError
    from worker.process.build import check_cpu_options, check_gpu_options

    try:
        if _on_gpu(options):
            index = gpu_index(options, torch.cuda.device_count(), 0, 0)
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            check_gpu(options, Gpu(name=name, capability=capability))
            check_gpu_options(options)
        else:
            check_cpu_options(options)
            prepare_threads(options)
    except PermanentError as error:
        return Reading(reader="refusal", refusal=str(error))
    return Reading(reader="refusal", refusal="")


def read_model(options: Options) -> Reading:
    """Reads a model's config; of a model on the hub, it fetches only that."""
    import torch

    from worker.errors import PermanentError
    from worker.layers.kv_cache import KVCache
    from worker.models.info import check_states, longest_sequence, model_dtype, refuse_states_on_gpus, with_block_size
    from worker.models.loader import config_of
    from worker.parallel.axes import shard_of, stage_of

    files = _config_files(options.model)
    config, made_for = config_of(files, options.model_impl)
    dtype, on_gpu = model_dtype(options), _on_gpu(options)
    try:
        longest_sequence(options, config)
        check_states(options, config)
        if on_gpu:
            refuse_states_on_gpus(options, config)
        block_size = with_block_size(options, config, dtype, on_gpu=on_gpu).block_size
    except PermanentError as error:
        return Reading(reader="model", refusal=str(error))
    quantization = options.quantization
    if quantization == "auto":
        quantization = made_for if made_for in offered(on_gpu=on_gpu) else "none"
    if on_gpu:
        from worker.gpu.build import weight_bytes

        num_bytes = weight_bytes(config, dtype, quantization)
    else:
        num_bytes = _packed_bytes(config, dtype.itemsize, quantization)
    kv_dtype = torch.float8_e4m3fn if options.kv_cache_dtype in ("fp8", "fp8_e4m3") else dtype
    if options.kv_cache_dtype == "bfloat16":
        kv_dtype = torch.bfloat16
    block_bytes = KVCache.block_bytes(config, block_size, kv_dtype, shard_of(options, 0), stage_of(options, 0))
    draft = None if on_gpu else _draft_model(options, files)
    draft_bytes = 0
    if draft is not None:
        draft_config, draft_dtype, draft_quantization = draft
        draft_bytes = _packed_bytes(draft_config, draft_dtype.itemsize, draft_quantization)
        block_bytes += KVCache.block_bytes(draft_config, block_size, draft_dtype)
    facts = ModelFacts(
        name=files.name,
        quantization=quantization,
        weight_bytes=num_bytes,
        block_bytes=block_bytes,
        block_size=block_size,
        context=config.max_position_embeddings,
        draft_bytes=draft_bytes,
    )
    return Reading(reader="model", model=facts)


def _draft_model(options: Options, files: ModelFiles) -> "tuple[ModelConfig, torch.dtype, str] | None":
    """Returns the draft model's config, its dtype and its quantization; None: there is none. files: the model's."""
    import torch

    from worker.models.info import model_dtype
    from worker.models.loader import config_of

    asked = options.speculative_config
    if asked is None or asked.method not in ("auto", "draft_model") or not asked.model:
        return None
    is_same = asked.model == SAME_MODEL
    config, made_for = config_of(files if is_same else _config_files(asked.model), "auto")
    dtypes = {"auto": model_dtype(options), "float32": torch.float32, "bfloat16": torch.bfloat16}
    quantization = made_for if asked.quantization == "auto" else asked.quantization
    return config, dtypes[asked.dtype], quantization if quantization in offered(on_gpu=False) else "none"


def _on_gpu(options: Options) -> bool:
    import torch

    return options.device != "cpu" and torch.version.cuda is not None and torch.cuda.is_available()


def _config_files(model: str) -> ModelFiles:
    path = Path(model).expanduser()
    if path.exists() or path.suffix == ".gguf" or model.startswith(PACKAGE_PREFIX):
        return resolve_model(model)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        config = hf_hub_download(model, "config.json")
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"model={model!r} is no directory or .gguf file here, and the hub does not give it: {cause}"
        ) from None
    return ModelFiles(path=Path(config).parent, name=model.rsplit("/", 1)[-1])


def _packed_bytes(config: "ModelConfig", itemsize: int, quantization: str) -> int:
    """The most bytes that a model's weights take as CPU kernels keep them: the embedding and the head are two tensors
    even if a checkpoint ties them, and a quantized model's head has 8 bits. In bfloat16, 12 of 16 bits may do."""
    from worker.models.registry import model_of

    total = 0.0
    kind = KINDS.get(quantization)
    head = 1.0 if kind else itemsize
    for name, shape in model_of(config).tensor_shapes(config).items():
        if name == "lm_head.weight":
            size = head
        elif len(shape) == 1 or name == "model.embed_tokens.weight":
            size = itemsize
        else:
            size = kind.param_bytes if kind else itemsize
        total += math.prod(shape) * size
    if config.tie_word_embeddings:
        total += config.vocab_size * config.hidden_size * head
    return int(total)


READERS: dict[str, Callable[[Options], Reading]] = {
    "torch": read_torch,
    "kernels": read_kernels,
    "refusal": read_refusal,
    "model": read_model,
}


def main() -> None:
    # Whatever else prints, prints to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        options = Options.model_validate_json(sys.stdin.read())
        for name, read in READERS.items():
            try:
                reading = read(options)
            except Exception as error:  # noqa: BLE001 - a broken installation raises anything; the page shows it
                cause = (str(error).strip() or repr(error)).splitlines()[0]
                reading = Reading(reader=name, error=cause if isinstance(error, ValueError) else _named(error, cause))
            print(reading.model_dump_json(exclude_none=True), file=answers, flush=True)


def _named(error: Exception, cause: str) -> str:
    return f"{type(error).__name__}: {cause}"


if __name__ == "__main__":
    main()
