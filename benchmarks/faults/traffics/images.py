"""Streams with images, and a small cluster that computes them: a tiny Qwen2.5-VL with random weights, in the same
process layout as a large one, which needs transformers to be written. The images of a stream stand between texts; some
images are in many streams.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.crowd import Plan, make_plans
from benchmarks.faults.ground import COMMON_FLAGS, OwnFlags
from benchmarks.faults.traffics.streams import StreamKind
from octavo.client.requests import Message, Prompt

_MOST_IMAGES = 3
# Prompts are computed in chunks that end inside images. Few KV blocks are there, so that streams are preempted, and the
# encoder's cache has no room for two streams' images.
FLAGS = (
    *COMMON_FLAGS,
    "--max-num-seqs=12",
    "--max-model-len=1024",
    "--num-blocks-override=180",
    "--max-num-batched-tokens=64",
    "--max-num-encoder-input-tokens=64",
    "--encoder-cache-size=100",
    f'--limit-mm-per-prompt={{"image": {_MOST_IMAGES}, "video": 0}}',
)

_SHARED_IMAGES = 6
_FORMATS = ("PNG", "JPEG", "WEBP")
_SIDES = (12, 90)
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
_TEXTS = ("Compare this ", "Here is the harbour at noon: ", "and one more, ", "", "\n", "What is left of it in ")


def tiny_model(directory: Path) -> tuple[Sequence[str], OwnFlags]:
    """Writes the files of the tiny model; returns the flags with which a cluster serves it."""
    # Imports transformers, which takes seconds.
    from tests.support.models.vision_models import qwen2_5_vl, write_model

    model = directory / "model"
    write_model(qwen2_5_vl, model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return [f"--model={model}"], {}


def make_image_plans(count: int, seed: int, *, mean_tokens: int) -> list[Plan]:
    """Makes plans of one to three images: chats and prompts of text, greedy and sampled, as make_plans does."""
    choose = random.Random(f"{seed}/images")
    shared = [_file(choose) for _ in range(_SHARED_IMAGES)]
    return [_with_images(plan, shared, choose) for plan in make_plans(count, seed, mean_tokens=mean_tokens)]


def _with_images(plan: Plan, shared: list[bytes], choose: random.Random) -> Plan:
    files = [
        choose.choice(shared) if choose.random() < 0.5 else _file(choose)
        for _ in range(choose.randint(1, _MOST_IMAGES))
    ]
    kind = f"{len(files)} image{'s' if len(files) > 1 else ''}"
    last = f"{choose.randrange(1000)}?"
    if isinstance(plan.prompt, str):
        text = "".join(f"{choose.choice(_TEXTS)}<image>" for _ in files) + last
        return replace(plan, kind=f"{kind}, text", prompt=text, options={"items": files})
    content: list[object] = []
    for file in files:
        content += [{"type": "text", "text": choose.choice(_TEXTS)}, {"type": "image", "image": file}]
    message: Message = {"role": "user", "content": [*content, {"type": "text", "text": last}]}
    prompt: Prompt = [message]
    return replace(plan, kind=f"{kind}, chat", prompt=prompt)


def _file(choose: random.Random) -> bytes:
    """The file of an image that no other call returns."""
    from tests.support.models.vision_models import file_of, picture

    width, height = choose.randint(*_SIDES), choose.randint(*_SIDES)
    return file_of(picture(width, height, choose.randrange(2**32)), choose.choice(_FORMATS))


IMAGES = StreamKind(
    make=lambda count, seed, tokens: make_image_plans(count, seed, mean_tokens=tokens),
    tokens=300,
    flags=FLAGS,
    equip=tiny_model,
)
