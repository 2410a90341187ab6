"""LLM with images: a tiny Qwen2.5-VL with random weights says what transformers says, however the images are given."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

from octavo import LLM, SamplingParams
from octavo.client.errors import InvalidRequest
from tests.support.local import engine_of
from tests.support.models.vision_models import IMAGE, file_of, picture, qwen2_5_vl, write_model

_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IMAGES = [picture(30, 40), picture(33, 20, seed=2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """The model as transformers has it."""
    made = write_model(qwen2_5_vl, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return made


@pytest.fixture(scope="module")
def llm(directory: Path, reference: Any) -> LLM:
    # As users of vLLM write it, with no other memory than the defaults.
    return LLM(str(directory), dtype="float32", limit_mm_per_prompt={"image": 2})


def _prompt(*images: object, text: str = "ab<image>cd") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def _tokens(llm: LLM, *prompts: dict[str, Any], **fields: Any) -> list[tuple[int, ...]]:
    return [each.choices[0].token_ids for each in llm.generate(prompts, GREEDY, **fields)]


def test_outputs_are_those_of_transformers(llm: LLM, reference: Any, directory: Path) -> None:
    both = {"prompt": "a<image>b<image>c", "multi_modal_data": {"image": IMAGES}}
    results = llm.generate([_prompt(IMAGES[0]), both, {"prompt": "abcd"}], GREEDY)
    processor = processing.Qwen2VLImageProcessorPil.from_pretrained(directory)
    for result, images in zip(results, (IMAGES[:1], IMAGES, []), strict=True):
        ids = torch.tensor([result.prompt_token_ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            inputs.update(processor(images, return_tensors="pt"), mm_token_type_ids=(ids == IMAGE).int())
        said = reference.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8)
        assert list(result.choices[0].token_ids) == said[0, ids.shape[1] :].tolist()


def test_an_image_may_be_given_in_any_form(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(file_of(IMAGES[0]))
    (expected,) = _tokens(llm, _prompt(IMAGES[0]))
    forms = [path, str(path), path.read_bytes()]
    assert _tokens(llm, *map(_prompt, forms)) == [expected] * 3
    for part in ({"type": "image", "image": path}, {"type": "image_pil", "image_pil": IMAGES[0]}):
        answer = llm.chat([{"role": "user", "content": ["ab", part, "cd"]}], GREEDY)
        assert answer.choices[0].token_ids == expected
        # The prefix cache knows the image, which has the name of before.
        assert answer.usage is not None
        assert answer.usage.cached_tokens
    assert _tokens(llm, _prompt(IMAGES[1])) != [expected]


def test_several_choices_and_a_search(llm: LLM) -> None:
    (expected,) = _tokens(llm, _prompt(IMAGES[0]))
    (choices,) = llm.generate([_prompt(IMAGES[0])], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3))
    assert [choice.token_ids for choice in choices.choices] == [expected] * 3
    (search,) = llm.generate([_prompt(IMAGES[0])], GREEDY, beam_width=3)
    assert len(search.choices[0].token_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (_prompt(file_of(IMAGES[0])[:-200]), "an image can't be decoded: .*send a whole file"),
        (_prompt(b"GIF89a"), r"items\[0\].image: the header of the GIF file is damaged"),
        (_prompt(*IMAGES, IMAGES[0], text="<image>" * 3), "image 3 of 3: limit_mm_per_prompt allows 2"),
        (_prompt(*IMAGES), "prompt has 1 placeholders for images .token 390., and the request has 2"),
        (_prompt("https://example.com/a.png"), "nothing is fetched here, give the file"),
        ({"prompt": "a", "multi_modal_data": {"video": [IMAGES] * 2}}, "video 2 of 2: limit_mm_per_prompt allows 1"),
    ],
)
def test_errors_name_the_image_and_leave_nothing(llm: LLM, prompt: dict[str, Any], words: str) -> None:
    (expected,) = _tokens(llm, _prompt(IMAGES[1]))
    with pytest.raises(InvalidRequest, match=words):
        llm.generate([_prompt(IMAGES[0], text="x<image>y"), prompt], GREEDY)
    assert not engine_of(llm).has_work
    assert not engine_of(llm)._items._files
    assert _tokens(llm, _prompt(IMAGES[1])) == [expected]
