"""Options of images and videos in requests: how many, how large, and where they may come from."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from configs.groups.field import MODEL, ROUTER, json_text, option, split_commas

_MOST_PIXELS = 1 << 28


class ItemLimit(BaseModel):
    """The bound of one kind of items in a request, and the largest ones to reserve memory for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # 0: requests have none of this kind.
    count: int = Field(ge=0, le=256)
    # The largest one that requests bring; 0: whatever the model takes. Larger ones are refused.
    width: int = Field(default=0, ge=0, le=65_536)
    height: int = Field(default=0, ge=0, le=65_536)
    # Frames of the longest video. 0: 16.
    num_frames: int = Field(default=0, ge=0, le=1024)


def _as_limit(value: object) -> object:
    return {"count": value} if isinstance(value, int) and not isinstance(value, bool) else value


Limit = Annotated[ItemLimit, BeforeValidator(_as_limit)]


class ItemLimits(BaseModel):
    """limit_mm_per_prompt, as vLLM writes it: {"image": 2}, or {"image": {"count": 2, "width": 640, "height": 480}}."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Limit = ItemLimit(count=16)
    video: Limit = ItemLimit(count=1)


class ProcessorOptions(BaseModel):
    """mm_processor_kwargs: how images become pixels. None: as the model's preprocessor_config.json says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Bounds of an image after it was resized.
    min_pixels: int | None = Field(default=None, ge=1, le=_MOST_PIXELS)
    max_pixels: int | None = Field(default=None, ge=1, le=_MOST_PIXELS)

    @field_validator("max_pixels", mode="after")
    @classmethod
    def _in_order(cls, most: int | None, info: Any) -> int | None:
        least = info.data.get("min_pixels")
        if most is not None and least is not None and least > most:
            raise ValueError(f"max_pixels={most} is below min_pixels={least}: give at least as many")
        return most


class MediaOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    limit_mm_per_prompt: Annotated[ItemLimits, json_text('{"image": 2}')] = option(
        MODEL,
        ItemLimits(),
        'Images and videos that a request may have, as JSON: {"image": 2, "video": 0}, or with the largest size: '
        '{"image": {"count": 2, "width": 640, "height": 480}}. Lower limits leave more memory for KV blocks. Default: '
        "16 images, 1 video.",
    )
    mm_processor_kwargs: Annotated[ProcessorOptions, json_text('{"max_pixels": 1003520}')] = option(
        MODEL,
        ProcessorOptions(),
        'How images are resized, as JSON: {"min_pixels": 3136, "max_pixels": 1003520}. Default: as the model\'s '
        "preprocessor_config.json says.",
    )
    max_num_encoder_input_tokens: int = option(
        MODEL,
        0,
        "Maximum number of embeddings of images and videos that one step computes; an item is computed whole. 0: as "
        "many as max_num_batched_tokens, or the largest item if that is more.",
        ge=0,
        le=1_048_576,
    )
    encoder_cache_size: int = option(
        MODEL,
        0,
        "Embeddings of images and videos that workers keep for further requests with the same item. 0: as "
        "max_num_encoder_input_tokens.",
        ge=0,
        le=16_777_216,
    )
    max_item_mib: float = option(
        ROUTER, 20.0, "Maximum size of an image's file, and of a video's files together, in MiB.", gt=0, le=1024
    )
    max_item_pixels: int = option(
        ROUTER,
        40_000_000,
        "Maximum number of pixels of an image as it is in its file. Larger ones are refused before they are decoded.",
        ge=1,
        le=_MOST_PIXELS,
    )
    max_items_mib: float = option(
        ROUTER, 64.0, "Maximum size of all files of a request's images and videos together, in MiB.", gt=0, le=1024
    )
    item_memory: float = option(
        ROUTER,
        0.5,
        "GiB of memory for the files of images and videos, in each router process and in each scheduler; requests that "
        "do not fit are refused until others have ended.",
        gt=0,
        le=1024,
    )
    allowed_media_domains: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = option(
        ROUTER,
        (),
        "Hosts from which routers fetch images that requests name by URL, comma-separated, such as "
        "upload.wikimedia.org. Addresses of private networks are never fetched from. Empty: URLs are refused.",
    )
    media_fetch_timeout: float = option(ROUTER, 5.0, "Seconds to fetch an image by its URL.", gt=0, le=300)
