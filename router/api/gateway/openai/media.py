"""Images and videos in requests' JSON, and their conversion to the messages of gRPC."""

from typing import Any

from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from protos import inference_pb2 as pb
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.fields import HINT, Fields, Reading, known
from router.request.media.data_urls import decode_all, decode_data_url, is_data_url

# The types of parts that are items.
MEDIA = ("image_url", "video_url")
# What says nothing.
_USUAL_DETAIL = (None, "auto")
# A video comes as frames, as vLLM's clients encode them: base64 of each, with commas between them.
_VIDEO = "video/jpeg"


class ImageUrl(known({"detail": HINT})):
    """A data: URI, or a URL to fetch from."""

    url: str

    @model_validator(mode="after")
    def _note_detail(self, info: ValidationInfo) -> "ImageUrl":
        detail: Any = getattr(self, "detail", None)
        if detail not in _USUAL_DETAIL and isinstance(info.context, Reading):
            info.context.note("detail")
        return self


class VideoUrl(Fields):
    url: str


class ProcessorKwargs(Fields):
    """mm_processor_kwargs: how images become pixels."""

    min_pixels: int | None = Field(None, ge=1, lt=2**32)
    max_pixels: int | None = Field(None, ge=1, lt=2**32)

    def options(self) -> pb.ItemOptions:
        return pb.ItemOptions(min_pixels=self.min_pixels, max_pixels=self.max_pixels)


class VideoKwargs(known({"num_frames": HINT})):
    # Frames of a second.
    fps: float = Field(0.0, ge=0)


class IoKwargs(known({"image": HINT, "audio": HINT})):
    """media_io_kwargs: how files are read."""

    video: VideoKwargs | None = None

    @property
    def frames_per_second(self) -> float:
        return 0.0 if self.video is None else self.video.fps


def image_of(url: str, place: str, param: str = "messages") -> pb.Image:
    """Returns an image, its data decoded. place: the URL's, for errors. Raises BadRequestError."""
    if not is_data_url(url):
        return pb.Image(url=url)
    try:
        data, mime_type = decode_data_url(url)
    except ValueError as error:
        raise BadRequestError(f"{place}: {error}", param=param) from None
    return pb.Image(data=data, mime_type=mime_type)


def video_of(url: str, frames_per_second: float, place: str) -> pb.Video:
    """Raises BadRequestError."""
    if not is_data_url(url) or url[5 : 5 + len(_VIDEO)].lower() != _VIDEO:
        raise BadRequestError(
            f"{place}: a video comes as its frames: use data:{_VIDEO};base64, and the base64 of each JPEG, with commas "
            "between them",
            param="messages",
        )
    try:
        files, _ = decode_all(url)
    except ValueError as error:
        raise BadRequestError(f"{place}: {error}", param="messages") from None
    return pb.Video(frames=[pb.Image(data=file) for file in files], frames_per_second=frames_per_second)


def check_media(kind: str, given: object) -> None:
    """Checks that a part has what its type names. Raises PydanticCustomError."""
    if given is None:
        raise PydanticCustomError("no_media", "a part of type {type} needs {type}", {"type": kind})
