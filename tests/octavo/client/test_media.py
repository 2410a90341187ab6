"""Images that users give to the clients: what becomes of each form."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.client.errors import InvalidRequest
from octavo.client.media import Video, content_parts, image_of, item_options, multi_modal_items
from octavo.client.requests import generate_request
from tests.fakes.media import image_file

FILE = image_file(5, 7)


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_files_travel_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    for source in (path, str(path), FILE, bytearray(FILE)):
        assert image_of(source).data == FILE
    for url in ("https://example.com/a.png", "data:image/png;base64,AA=="):
        assert image_of(url).url == url


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pillows_images_keep_their_pixels(mode: str) -> None:
    image = Image.effect_noise((9, 6), 80).convert(mode)
    assert _opened(image_of(image).data).tobytes() == image.tobytes()


def test_other_modes_become_rgb_and_no_rotation_is_left() -> None:
    image = Image.new("CMYK", (9, 6), (10, 20, 30, 40))
    sent = _opened(image_of(image).data)
    assert (sent.mode, sent.tobytes()) == ("RGB", image.convert("RGB").tobytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(image_file(5, 7, "JPEG", exif=exif)))
    sent = _opened(image_of(turned).data)
    assert sent.size == (5, 7)
    assert not sent.getexif()


def test_arrays_are_images_and_videos() -> None:
    array = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    assert _opened(image_of(array[0]).data).size == (6, 4)
    (item,) = multi_modal_items({"video": array})
    assert len(item.video.frames) == 2
    assert np.array_equal(np.asarray(_opened(item.video.frames[1].data)), array[1])


def test_vllms_multi_modal_data() -> None:
    frames = [FILE, FILE]
    items = multi_modal_items({"image": [FILE, FILE], "video": [frames, Video(frames=frames, frames_per_second=4)]})
    assert [item.WhichOneof("kind") for item in items] == ["image", "image", "video", "video"]
    assert [item.video.frames_per_second for item in items[2:]] == [0, 4]
    (alone,) = multi_modal_items({"image": FILE})
    assert alone.image.data == FILE
    (single,) = multi_modal_items({"video": frames})
    assert len(single.video.frames) == 2
    request = generate_request(
        {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": FILE}, "mm_processor_kwargs": {"max_pixels": 9}},
        None,
        {},
    )
    assert (list(request.token_ids.ids), len(request.items), request.item_options.max_pixels) == ([1, 2], 1, 9)


def test_parts_of_messages() -> None:
    content: list[Any] = [
        "a",
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image", "image": FILE},
        {"type": "image_pil", "image_pil": _opened(FILE)},
        {"type": "video", "video": [FILE], "fps": 3},
        FILE,
    ]
    request = generate_request([{"role": "user", "content": content}], None, {})
    (message,) = request.chat.messages
    assert list(message.parts) == content_parts(content)
    assert message.content == ""
    kinds = [part.item.WhichOneof("kind") or part.text for part in message.parts]
    assert kinds == ["a", "b", "image", "image", "image", "video", "image"]
    assert message.parts[5].item.video.frames_per_second == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: image_of("/no/such/file.png"), "'/no/such/file.png' can't be read"),
        (lambda: image_of(3), "an image is of type int: give a path"),
        (lambda: content_parts([{"type": "audio", "audio": b""}]), "type='audio': use text, image"),
        (lambda: content_parts([{"type": "image"}]), "type='image' and .'type'."),
        (
            lambda: content_parts([{"type": "image_url", "image_url": "/etc/passwd"}]),
            "image_url='/etc/passwd': give a data:",
        ),
        (lambda: multi_modal_items({"audio": 1}), "multi_modal_data has 'audio'"),
        (lambda: multi_modal_items({"video": b"mp4"}), "a video is of type bytes: give its frames"),
        (lambda: item_options({"size": 1}), "mm_processor_kwargs has size"),
        (lambda: item_options({"min_pixels": -1}), "mm_processor_kwargs="),
        (lambda: generate_request({"multi_modal_data": {}}, None, {}), "give prompt or prompt_token_ids"),
        (lambda: generate_request({"prompt": "a", "images": []}, None, {}), "a prompt has images: use prompt"),
    ],
)
def test_errors_say_what_works(wrong, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        wrong()
