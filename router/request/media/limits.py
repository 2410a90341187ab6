"""Bounds of the images and videos of a request, from the options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from configs.groups.media import ItemLimit
from configs.options import Options
from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.media.asked import AskedItem
from runtime.media.headers import ImageHeader

KINDS = {pb.ITEM_KIND_IMAGE: "image", pb.ITEM_KIND_VIDEO: "video"}
# Frames of a video if limit_mm_per_prompt does not say how many.
_MOST_FRAMES = 16
# What transformers assumes for a video that does not tell; and the most that is believed.
_FRAMES_PER_SECOND, _MOST_FRAMES_PER_SECOND = 2.0, 1000.0
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    per_prompt: dict[pb.ItemKind, ItemLimit]
    # How images become pixels, unless a request says it.
    defaults: pb.ItemOptions
    max_item_bytes: int
    max_request_bytes: int
    max_item_pixels: int

    @classmethod
    def of(cls, options: Options) -> Self:
        limits, processor = options.limit_mm_per_prompt, options.mm_processor_kwargs
        return cls(
            per_prompt={pb.ITEM_KIND_IMAGE: limits.image, pb.ITEM_KIND_VIDEO: limits.video},
            defaults=pb.ItemOptions(min_pixels=processor.min_pixels, max_pixels=processor.max_pixels),
            max_item_bytes=math.floor(options.max_item_mib * _MIB),
            max_request_bytes=math.floor(options.max_items_mib * _MIB),
            max_item_pixels=options.max_item_pixels,
        )

    @property
    def takes_items(self) -> bool:
        return any(limit.count for limit in self.per_prompt.values())

    def resolved(self, asked: pb.ItemOptions) -> pb.ItemOptions:
        """Returns the request's options, or else those of mm_processor_kwargs. Raises InvalidRequest."""
        options = pb.ItemOptions()
        options.CopyFrom(self.defaults)
        options.MergeFrom(asked)
        for name in ("min_pixels", "max_pixels"):
            if asked.HasField(name) and not getattr(asked, name):
                raise InvalidRequest(f"item_options.{name}=0: use at least 1, or leave it unset")
        if options.HasField("max_pixels") and options.min_pixels > options.max_pixels:
            raise InvalidRequest(
                f"item_options.min_pixels={options.min_pixels} is above max_pixels={options.max_pixels}: use less"
            )
        # Memory is reserved for items of that size.
        if self.defaults.HasField("max_pixels") and options.max_pixels > self.defaults.max_pixels:
            raise InvalidRequest(
                f"item_options.max_pixels={options.max_pixels}: use at most {self.defaults.max_pixels}, which is "
                "max_pixels of the option mm_processor_kwargs"
            )
        return options

    def check_asked(self, asked: Sequence[AskedItem]) -> None:
        """Checks numbers of items and frames. Raises InvalidRequest."""
        for kind, name in KINDS.items():
            found = [each for each in asked if each.kind == kind]
            limit = self.per_prompt[kind]
            if len(found) > limit.count:
                field = found[limit.count].field
                allowed = f"limit_mm_per_prompt allows {limit.count} a request"
                raise InvalidRequest(f"{field} is {name} {limit.count + 1} of {len(found)}: {allowed}")
            for each in found:
                if not each.images:
                    raise InvalidRequest(f"{each.field}.frames is empty: give at least one")
                if kind == pb.ITEM_KIND_VIDEO and len(each.images) > (most := limit.num_frames or _MOST_FRAMES):
                    raise InvalidRequest(
                        f"{each.field}.frames has {len(each.images)} entries: limit_mm_per_prompt allows "
                        f"num_frames={most}"
                    )

    def check_header(self, kind: pb.ItemKind, header: ImageHeader) -> None:
        """Raises ValueError."""
        limit, name = self.per_prompt[kind], KINDS[kind]
        for side, size, most in (("width", header.width, limit.width), ("height", header.height, limit.height)):
            if most and size > most:
                raise ValueError(
                    f"it has {header.width} x {header.height} pixels: limit_mm_per_prompt allows {side}={most} for "
                    f"{name}s"
                )


def frames_per_second(asked: AskedItem) -> float:
    """Returns those of a video; 0 for an image. Raises InvalidRequest."""
    if asked.kind != pb.ITEM_KIND_VIDEO:
        return 0.0
    rate = asked.frames_per_second or _FRAMES_PER_SECOND
    if not 0 < rate <= _MOST_FRAMES_PER_SECOND:
        raise InvalidRequest(
            f"{asked.field}.frames_per_second={rate:g}: use 0 for {_FRAMES_PER_SECOND:g}, or up to "
            f"{_MOST_FRAMES_PER_SECOND:g}"
        )
    return rate
