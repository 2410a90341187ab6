"""A model that takes images and videos, for routers: a real recipe, and SmolLM2's tokenizer with a template."""

import io
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from PIL import Image

from configs.features import ITEMS
from protos import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.media.recipes.qwen2_vl import PixelBounds, Qwen2VLRecipe
from runtime.media.recipes.registry import recipe_to_json
from tests.fakes.routers import smollm2_tokenizer
from tests.fakes.scheduler import FakeScheduler, model_info

# <filename> and <gh_stars>.
IMAGE_TOKEN, VIDEO_TOKEN = 6, 7
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<filename>{% elif part.type == 'video' %}<gh_stars>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

RECIPE = Qwen2VLRecipe(
    image_token=IMAGE_TOKEN,
    video_token=VIDEO_TOKEN,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    image=PixelBounds(56 * 56, 28 * 28 * 64),
    video=PixelBounds(56 * 56, 28 * 28 * 32),
    tokens_per_second=2.0,
)


@cache
def media_tokenizer() -> Tokenizer:
    directory = Path(mkdtemp(prefix="media-tokenizer-"))
    try:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(smollm2_tokenizer().directory / name, directory / name)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": _TEMPLATE}))
        return Tokenizer(directory)
    finally:
        shutil.rmtree(directory)


def media_scheduler(address: str, **fields: object) -> FakeScheduler:
    """Returns a replica that takes items."""
    model = model_info(media_json=recipe_to_json(RECIPE))
    return FakeScheduler(address, model=model, features=[ITEMS], **fields)  # type: ignore[arg-type]


def image_file(
    width: int = 60, height: int = 90, form: str = "PNG", *, color: int = 0x3366AA, **options: object
) -> bytes:
    """Returns an image's file."""
    written = io.BytesIO()
    Image.new("RGB", (width, height), color).save(written, form, **options)
    return written.getvalue()


def image_item(data: bytes) -> pb.Item:
    return pb.Item(image=pb.Image(data=data))


def video_item(*frames: bytes, frames_per_second: float = 0.0) -> pb.Item:
    video = pb.Video(frames=[pb.Image(data=frame) for frame in frames], frames_per_second=frames_per_second)
    return pb.Item(video=video)


def chat_with(*parts: str | pb.Item) -> pb.ChatPrompt:
    """Returns a chat of one message."""
    message = pb.ChatMessage(role="user")
    for part in parts:
        message.parts.append(pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(item=part))
    return pb.ChatPrompt(messages=[message])
