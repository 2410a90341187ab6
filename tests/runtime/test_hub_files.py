"""Which files of a repository are taken, and what is said where none can be."""

import pytest

from runtime.hub.errors import HubError
from runtime.hub.files import RepoFile, choose, parse_name
from runtime.hub.progress import Lines, bytes_text
from runtime.model_files import ModelNotFoundError, resolve_model

CONFIG = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QUANTIZED = ("SmolLM-Q4_K_M.gguf", "SmolLM-Q8_0.gguf", "SmolLM-IQ4_XS.gguf", "mmproj-F16.gguf")


def chosen(*names: str, choice: str = "") -> set[str]:
    files = [RepoFile(name=name, size=1_000_000) for name in names]
    return {file.name for file in choose("org/name", files, choice)}


def test_code_pickles_and_second_copies_are_left() -> None:
    left = ("modeling_x.py", "pytorch_model.bin", "README.md", "training_args.bin", "original/params.json", "notes.txt")
    assert chosen(*CONFIG, "model.safetensors", *left, "consolidated.safetensors") == {*CONFIG, "model.safetensors"}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    index = "model.safetensors.index.json"
    assert chosen(*CONFIG, index, *shards, "consolidated.safetensors", *left) == {*CONFIG, index, *shards}


def test_sentencepiece_and_bpe_tokenizers_are_taken() -> None:
    files = {"config.json", "weights.safetensors", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"}
    assert chosen(*files, "vocabulary.model") == files


def test_the_only_gguf_file_needs_no_choice() -> None:
    assert chosen("README.md", "SmolLM-Q8_0.gguf", "mmproj-F16.gguf") == {"SmolLM-Q8_0.gguf"}


@pytest.mark.parametrize("choice", ["Q4_K_M", "q4_k_m", "SmolLM-Q4_K_M", "SmolLM-Q4_K_M.gguf"])
def test_a_quantization_or_a_file_is_chosen(choice: str) -> None:
    assert chosen(*QUANTIZED, "config.json", "model.safetensors", choice=choice) == {"SmolLM-Q4_K_M.gguf"}


def test_a_quantization_is_a_whole_word() -> None:
    with pytest.raises(HubError, match="no GGUF file 'Q4_K'; it has org/name:Q4_K_M"):
        chosen(*QUANTIZED, choice="Q4_K")
    with pytest.raises(HubError, match="no GGUF file 'Q4_XS'"):
        chosen(*QUANTIZED, choice="Q4_XS")


def test_several_gguf_files_are_offered_with_their_sizes() -> None:
    with pytest.raises(HubError) as raised:
        chosen(*QUANTIZED)
    offers = ", ".join(f"org/name:{name} (1.0 MB)" for name in ("Q4_K_M", "Q8_0", "IQ4_XS"))
    assert str(raised.value) == f"org/name has 3 GGUF files; choose one: {offers}"


def test_every_offer_can_be_taken() -> None:
    names = ("a-Q8_0.gguf", "b-Q8_0.gguf", "c.F16.gguf", "UD/c-UD-Q2_K_XL.gguf", "plain.gguf", "d-MXFP4_MOE.gguf")
    with pytest.raises(HubError) as raised:
        chosen(*names)
    offers = [offer.partition(" (")[0] for offer in str(raised.value).partition("choose one: ")[2].split(", ")]
    taken = [chosen(*names, choice=parse_name(offer)[1]) for offer in offers]
    assert set.union(*taken) == set(names)
    assert len(taken) == len(names)


def test_a_choice_that_fits_two_files_is_refused() -> None:
    with pytest.raises(HubError, match=r"fits 2 GGUF files.*org/name:a-Q8_0.gguf, org/name:b-Q8_0.gguf"):
        chosen("a-Q8_0.gguf", "b-Q8_0.gguf", choice="Q8_0")


def test_gguf_files_in_parts_are_refused() -> None:
    parts = [f"big-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    with pytest.raises(HubError, match="one of 3 parts"):
        chosen("small-Q4_0.gguf", *parts, choice="Q8_0")
    assert chosen("small-Q4_0.gguf", *parts, choice="Q4_0") == {"small-Q4_0.gguf"}
    with pytest.raises(HubError, match="only files in parts"):
        chosen(*parts)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("config.json", "pytorch_model.bin"), "only as pickles (pytorch_model.bin)"),
        (("config.json", "a.pt", "b.pth"), "only as pickles (a.pt, ...)"),
        (("adapter_config.json", "adapter_model.safetensors"), "no config.json"),
        (("README.md",), "no safetensors and no GGUF files; it has README.md"),
        ((), "it has none"),
    ],
)
def test_what_cannot_be_served_is_told(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(HubError) as raised:
        chosen(*names)
    assert said in str(raised.value)


def test_a_choice_without_gguf_files_is_refused() -> None:
    with pytest.raises(HubError, match="leave :Q4_K_M out"):
        chosen("config.json", "model.safetensors", choice="Q4_K_M")


@pytest.mark.parametrize("model", ["./models/nonesuch", "/nonesuch/model", "~/nonesuch", "a/b/c", "package", "x y"])
def test_paths_that_are_not_there_are_not_looked_for_on_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if model == "package":
        model = "package:nonesuch"
    with pytest.raises(ModelNotFoundError, match=r"no such (directory or file|package)"):
        resolve_model(model)


def test_lines_come_at_each_tenth() -> None:
    said = list[str]()
    lines = Lines(said.append)
    lines.begin("org/name", {"a": 600, "b": 400})
    for done in range(0, 601, 25):
        lines.advance("a", done)
    lines.advance("b", 400)
    assert said[0] == "downloading org/name: 2 files, 1.0 kB"
    assert [line.partition(": ")[2].partition("%")[0] for line in said[1:]] == [
        "10",
        "20",
        "30",
        "40",
        "50",
        "60",
        "100",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_999, "1.0 MB"),
        (93_000_000, "93.0 MB"),
        (5_400_000_000, "5.4 GB"),
        (1_200_000_000_000, "1.2 TB"),
    ],
)
def test_sizes_are_those_of_the_hub(size: int, text: str) -> None:
    assert bytes_text(size) == text
