"""The images and videos that a request's message has, each with the name of its field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.errors import InvalidRequest

# Parts of a message of a chat, as over HTTP.
MAX_PARTS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedItem:
    # Where it stands, such as items[0].image; for errors.
    field: str
    kind: pb.ItemKind
    # One, or a video's frames.
    images: Sequence[pb.Image]
    frames_per_second: float = 0.0

    def image_field(self, index: int) -> str:
        return f"{self.field}.frames[{index}]" if self.kind == pb.ITEM_KIND_VIDEO else self.field


def asked_items(message: pb.GenerateRequest | pb.TokenizeRequest) -> list[AskedItem]:
    """Returns a message's items, in the order of their placeholders in the prompt. Raises InvalidRequest."""
    found = list(_of_chat(message.chat)) if message.WhichOneof("input") == "chat" else []
    if isinstance(message, pb.GenerateRequest):
        found += [_asked(item, f"items[{i}]") for i, item in enumerate(message.items)]
    return found


def check_parts(message: pb.ChatMessage, field: str) -> None:
    """Checks the forms of a message's parts. field: the message's. Raises InvalidRequest."""
    parts = message.parts
    if not parts:
        return
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"{field}.parts has {len(parts)} entries: use at most {MAX_PARTS}")
    if message.content:
        raise InvalidRequest(f"{field}.content is set, and parts, too: use one of them")
    for j, part in enumerate(parts):
        if part.WhichOneof("part") is None:
            raise InvalidRequest(f"{field}.parts[{j}] is empty: set text or item")


def _of_chat(chat: pb.ChatPrompt) -> Iterator[AskedItem]:
    for i, message in enumerate(chat.messages):
        for j, part in enumerate(message.parts):
            if part.HasField("item"):
                yield _asked(part.item, f"chat.messages[{i}].parts[{j}].item")


def _asked(item: pb.Item, field: str) -> AskedItem:
    """Raises InvalidRequest."""
    kind = item.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(f"{field} is empty: set image or video")
    field = f"{field}.{kind}"
    if kind == "image":
        asked = AskedItem(field=field, kind=pb.ITEM_KIND_IMAGE, images=(item.image,))
    else:
        video = item.video
        asked = AskedItem(
            field=field, kind=pb.ITEM_KIND_VIDEO, images=video.frames, frames_per_second=video.frames_per_second
        )
    for index, image in enumerate(asked.images):
        if image.WhichOneof("source") is None:
            raise InvalidRequest(f"{asked.image_field(index)} has no source: set data or url")
    return asked
