"""Images and videos in requests: files, bytes, and Pillow's images become items of the wire."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from octavo.client.errors import InvalidRequest
from protos import inference_pb2 as pb

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

# A path, a file's bytes, a URL (data:, https://, http://), or an image of Pillow's.
ImageSource = Union[str, Path, bytes, "PilImage"]

_URLS = ("data:", "https://", "http://")
# Modes of Pillow's images that a PNG file keeps as they are.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_WHAT_WORKS = "give a path, a file's bytes, a URL, or an image of Pillow's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Frames in order, all of one size. frames_per_second: 0: 2, as transformers assumes."""

    frames: Sequence[ImageSource]
    frames_per_second: float = 0.0


ItemSource = ImageSource | Video


def image_of(source: object) -> pb.Image:
    """Converts one image. Raises InvalidRequest."""
    if isinstance(source, str) and source[:8].lower().startswith(_URLS):
        return pb.Image(url=source)
    if isinstance(source, str | os.PathLike):
        try:
            return pb.Image(data=Path(source).read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"image {str(source)[:200]!r} can't be read ({error}): {_WHAT_WORKS}") from None
    if isinstance(source, bytes | bytearray | memoryview):
        return pb.Image(data=bytes(source))
    if hasattr(source, "mode") and hasattr(source, "save"):
        return pb.Image(data=_png(source))
    if type(source).__name__ == "ndarray":
        from PIL import Image

        try:
            return pb.Image(data=_png(Image.fromarray(source)))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"an image is an array that Pillow can't read ({error}): {_WHAT_WORKS}") from None
    raise InvalidRequest(f"an image is of type {type(source).__name__}: {_WHAT_WORKS}")


def video_of(source: object, frames_per_second: float = 0.0) -> pb.Video:
    """Converts a Video, or frames: a sequence, or an array whose first axis is time. Raises InvalidRequest."""
    frames = source.frames if isinstance(source, Video) else source
    rate = source.frames_per_second if isinstance(source, Video) else frames_per_second
    if isinstance(frames, str | bytes) or not hasattr(frames, "__iter__"):
        raise InvalidRequest(f"a video is of type {type(source).__name__}: give its frames, a sequence of images")
    try:
        return pb.Video(frames=[image_of(frame) for frame in frames], frames_per_second=rate)  # type: ignore[attr-defined]
    except TypeError as error:
        raise InvalidRequest(f"frames_per_second={rate!r}: {error}") from None


def item_of(source: object) -> pb.Item:
    """Converts an image or a Video. Raises InvalidRequest."""
    return pb.Item(video=video_of(source)) if isinstance(source, Video) else pb.Item(image=image_of(source))


def content_parts(content: Sequence[Any]) -> list[pb.ContentPart]:
    """Converts a message's content in parts: texts, {"type": "text", "text": ...}, OpenAI's {"type": "image_url", ...},
    vLLM's {"type": "image_pil", ...}, and {"type": "image", "image": ...} or {"type": "video", "video": ...} with what
    image_of and video_of take. Raises InvalidRequest."""
    return [_part(part) for part in content]


def _part(part: object) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if not isinstance(part, Mapping):
        return pb.ContentPart(item=item_of(part))
    kind = part.get("type", "text")
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    given = part.get(kind) if isinstance(kind, str) else None
    if given is None:
        known = "text, image, image_url, image_pil and video"
        raise InvalidRequest(
            f"a part of a message has type={kind!r} and {sorted(part)}: types are {known}, each with its field"
        )
    if kind == "image_url":
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str) or not url[:8].lower().startswith(_URLS):
            raise InvalidRequest(f"image_url={str(url)[:60]!r}: give a data:, https:// or http:// URL, or type image")
        return pb.ContentPart(item=pb.Item(image=pb.Image(url=url)))
    if kind in ("image", "image_pil"):
        return pb.ContentPart(item=pb.Item(image=image_of(given)))
    if kind == "video":
        return pb.ContentPart(item=pb.Item(video=video_of(given, part.get("fps", 0.0))))
    raise InvalidRequest(f"a part of a message has type={kind!r}: use text, image, image_url, image_pil or video")


def multi_modal_items(data: Mapping[str, Any]) -> list[pb.Item]:
    """Converts vLLM's multi_modal_data: {"image": one or several, "video": one or several}. Raises InvalidRequest."""
    items: list[pb.Item] = []
    for name, given in data.items():
        if name not in ("image", "video"):
            raise InvalidRequest(f"multi_modal_data has {name!r}: image and video are what there is")
        if given is None:
            continue
        if name == "image":
            several = given if isinstance(given, list | tuple) else [given]
            items += [pb.Item(image=image_of(each)) for each in several]
        else:
            items += [pb.Item(video=video_of(each)) for each in _videos(given)]
    return items


def _videos(given: Any) -> Sequence[Any]:
    """A list of frames is one video, a list of videos is several."""
    if isinstance(given, Video) or not isinstance(given, list | tuple):
        return [given]
    is_several = bool(given) and (isinstance(given[0], Video | list | tuple) or getattr(given[0], "ndim", 0) == 4)
    return given if is_several else [given]


def item_options(kwargs: Mapping[str, Any]) -> pb.ItemOptions:
    """Converts mm_processor_kwargs. Raises InvalidRequest."""
    if unknown := sorted(kwargs.keys() - {"min_pixels", "max_pixels"}):
        raise InvalidRequest(
            f"mm_processor_kwargs has {', '.join(unknown)}: min_pixels and max_pixels are what there is"
        )
    try:
        return pb.ItemOptions(**kwargs)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"mm_processor_kwargs={dict(kwargs)!r}: {error}") from None


def _png(image: Any) -> bytes:
    """Encodes an image of Pillow's without loss, as far as PNG has its mode. Rotates nothing: such an image is as its
    owner sees it."""
    written = io.BytesIO()
    own = image if image.mode in _PNG_MODES else image.convert("RGB")
    # Its EXIF data may ask for a rotation that has been made already.
    own.save(written, "PNG", compress_level=1, exif=b"")
    return written.getvalue()
