"""Tells the page which images a chat may have, so that it refuses the others before it sends them."""

from typing import Any

from protos import inference_pb2 as pb
from router.intake.intake import Intake

# Bytes of a body that are left for its texts.
_TEXT_BYTES = 2**16


def chat_images(intake: Intake, max_body_bytes: int) -> dict[str, Any]:
    """why_not: why there can be none; empty: there can. count, request_bytes: of a request, which has the images of the
    whole chat. item_bytes, pixels, width, height: of one image; 0: unbounded. max_body_bytes: of a request."""
    limits = intake.items.limits
    image = limits.per_prompt[pb.ITEM_KIND_IMAGE]
    # In a body three bytes of a file take four.
    fitting = max(max_body_bytes - _TEXT_BYTES, 0) // 4 * 3
    return {
        "why_not": _why_not(intake, image.count),
        "count": image.count,
        "item_bytes": limits.max_item_bytes,
        "request_bytes": min(limits.max_request_bytes, fitting),
        "pixels": limits.max_item_pixels,
        "width": image.width,
        "height": image.height,
    }


def _why_not(intake: Intake, most: int) -> str:
    if not intake.max_model_len:
        return "no replica is ready: the router does not know yet whether the model takes images"
    if not intake.takes_items:
        return f"{intake.model_name} takes text only: no image can be attached"
    return "" if most else "limit_mm_per_prompt allows no images here: no image can be attached"
