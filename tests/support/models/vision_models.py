"""Tiny models with vision towers and random weights, as transformers writes them, and images for them."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO, ItemData

VOCAB_SIZE, IMAGE, VIDEO = 400, 390, 391
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PREPROCESSOR = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 4 * 64,
    "max_pixels": 40 * 64,
}
_TILES = {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 32}}


def qwen2_5_vl() -> PreTrainedModel:
    """Windows of 3 x 3 tokens, which most grids do not fill; the second layer sees whole frames."""
    vision = {
        "depth": 3,
        "hidden_size": 40,
        "num_heads": 2,
        "intermediate_size": 52,
        "patch_size": 4,
        "window_size": 24,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2, "patch_size": 4, "hidden_size": 64}
    config = Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return Qwen2VLForConditionalGeneration(config)


def _siglip(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        **changes,
    }


def smolvlm() -> PreTrainedModel:
    text = {**_TEXT, "model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(text_config=text, vision_config=_siglip(), image_token_id=IMAGE, scale_factor=4)
    )


def idefics3() -> PreTrainedModel:
    """As in SmolVLM-Instruct and Idefics3, a tile's side is no multiple of a patch's."""
    text = {**_TEXT, "model_type": "llama", "tie_word_embeddings": True}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text, vision_config=_siglip(patch_size=5), image_token_id=IMAGE, tie_word_embeddings=True
        )
    )


Make = Callable[[], PreTrainedModel]
QWEN: tuple[Make, ...] = (qwen2_vl, qwen2_5_vl)
TILED: tuple[Make, ...] = (smolvlm, idefics3)


def write_model(make: Make, directory: Path) -> PreTrainedModel:
    """Writes a model's files, and returns it as transformers has it."""
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        # Fresh biases are 0 and norm weights 1: a model that ignores them would pass.
        parameter.data.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_TILES if make in TILED else _PREPROCESSOR))
    write_tokenizer(directory)
    return model


def write_tokenizer(directory: Path) -> None:
    """Bytes are tokens 3 to 258, and the texts between tiles have tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {f"<{i}>": i for i in range(3)} | {byte: 3 + i for i, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    texts = ["<fake_token_around_image>", "<global-img>", *places]
    fill = [f"<unused_{i}>" for i in range(IMAGE - len(vocabulary) - len(texts))]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*texts, *fill, "<image>", "<video>")])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tokenizer.save(str(directory / "tokenizer.json"))


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Noise, and a gradient, so that a resized image still differs from place to place."""
    draws = np.random.default_rng(seed)
    bands = len(Image.new(mode, (1, 1)).getbands())
    gradient = np.linspace(0, 160, width)[None, :, None] + np.linspace(0, 60, height)[:, None, None]
    values = (gradient + draws.integers(0, 36, (height, width, bands))).astype(np.uint8)
    return Image.fromarray(values[..., 0] if bands == 1 else values, mode)


def file_of(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def item(images: Sequence[Image.Image], *, is_video: bool = False, frames_per_second: float = 0.0) -> ItemData:
    kind = ITEM_KIND_VIDEO if is_video else ITEM_KIND_IMAGE
    return ItemData(kind=kind, files=[file_of(image) for image in images], frames_per_second=frames_per_second)
