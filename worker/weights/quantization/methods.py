"""Reads quantization_config of a config.json: the method, and what it says about each layer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from worker.weights.quantization.awq import Awq
from worker.weights.quantization.bitsandbytes import BitsAndBytes
from worker.weights.quantization.compressed_tensors import CompressedTensors
from worker.weights.quantization.fp8 import FbgemmFp8, Fp8
from worker.weights.quantization.gptq import Gptq
from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.mxfp4 import Mxfp4

# By quant_method.
_METHODS: dict[str, type[Fp8 | FbgemmFp8 | CompressedTensors | Awq | Gptq | BitsAndBytes | Mxfp4]] = {
    "fp8": Fp8,
    "fbgemm_fp8": FbgemmFp8,
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": Mxfp4,
}


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization:
    """Reads quantization_config from a config.json. Raises ValueError if it is not supported."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return StoredQuantization()
    method = raw.get("quant_method") if isinstance(raw, Mapping) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"quantization_config: quant_method={method!r} is not supported; {', '.join(_METHODS)} and GGUF files are"
        )
    try:
        return msgspec.convert(raw, _METHODS[method]).stored()
    except ValueError as error:
        raise ValueError(f"quantization_config ({method}): {error}") from None
