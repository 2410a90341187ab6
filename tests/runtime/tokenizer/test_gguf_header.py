"""Headers of GGUF files from anyone: read as the gguf library reads them, or refused in words."""

import mmap
import struct
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type

from octavo.lab.errors import PlanError
from octavo.plan.costs.model_shape import read_shape
from runtime.model_files import ModelFiles
from runtime.tokenizer.convert import main
from runtime.tokenizer.files import TokenizerError, tokenizer_directory
from runtime.tokenizer.gguf_header import GGUFHeader, HeaderError, check_file, read_header
from worker.models.gguf_source import GGUFSource
from worker.weights.reader import WeightsError


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _number(key: str, value: int, kind: Type = Type.UINT32) -> bytes:
    return _text(key) + struct.pack("<I", kind) + struct.pack("<Q" if kind is Type.UINT64 else "<I", value)


def _array(key: str, kind: Type, count: int, data: bytes = b"") -> bytes:
    return _text(key) + struct.pack("<IIQ", Type.ARRAY, kind, count) + data


def _tensor(name: str, offset: int, dims: tuple[int, ...] = (8,), kind: Kind = Kind.F32) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in dims)
    return _text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def _file(
    tmp_path: Path, keys: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None, num_bytes: int = 64
) -> Path:
    head = struct.pack("<4sI", b"GGUF", 3) + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
    head += b"".join(keys) + b"".join(tensors)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 32 + num_bytes))
    return path


def _read(path: Path) -> GGUFHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_header(path, data)


HOSTILE: dict[str, tuple[list[bytes], list[bytes], tuple[int, int] | None, str]] = {
    "a key twice": ([_number("a", 1), _number("a", 2)], [], None, "has the key 'a' twice"),
    "a tensor twice": ([], [_tensor("t", 0), _tensor("t", 32)], None, "has the tensor 't' twice"),
    "shared bytes": ([], [_tensor("t", 0, (16,)), _tensor("u", 32)], None, "u begins at 32 of the data, within t"),
    "the same place": ([], [_tensor("t", 0), _tensor("u", 0)], None, "u begins at 0 of the data, within t"),
    "a place between": ([], [_tensor("t", 4)], None, "t begins at 4 of the data, not a multiple of 32"),
    "behind the end": ([], [_tensor("t", 64)], None, "cut short: t ends at byte 96 of the data, the file at 64"),
    "far behind it": ([], [_tensor("t", 2**63)], None, "cut short: t ends"),
    "sides beyond 64 bits": ([], [_tensor("t", 0, (2**62, 2**62, 2**62, 2**62))], None, "cut short: t ends"),
    "many dims": ([], [_tensor("t", 0, (1,) * 5)], None, "t has 5 dims"),
    "alignment 3": ([_number("general.alignment", 3)], [], None, "alignment is 3; a power of two"),
    "alignment 0": ([_number("general.alignment", 0)], [], None, "alignment is 0; a power of two"),
    "a long alignment": ([_number("general.alignment", 32, Type.UINT64)], [], None, "has the type UINT64; UINT32"),
    # The library makes objects for each, until there is no memory.
    "a long array": ([_array("a", Type.UINT8, 2**62)], [], None, "claims 4,611,686,018,427,387,904 entries"),
    "an array beyond": ([_array("a", Type.UINT64, 100)], [], None, "header exceeds its"),
    "long texts": ([_array("a", Type.STRING, 60, _text("a"))], [], None, "header exceeds its|entries"),
    "a long text": ([_text("a") + struct.pack("<IQ", Type.STRING, 2**60)], [], None, "header exceeds its"),
    "arrays in an array": ([_array("a", Type.ARRAY, 2)], [], None, "an array of arrays"),
    "many keys": ([], [], (0, 2**60), "claims 1,152,921,504,606,846,976 entries"),
    "many tensors": ([], [], (2**60, 0), "claims 1,152,921,504,606,846,976 entries"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_by_all_readers(case: str, tmp_path: Path) -> None:
    """Workers, plans and the conversion of tokenizers read one header, so that none of them takes another one's."""
    keys, tensors, counts, words = HOSTILE[case]
    path = _file(tmp_path, keys, tensors, counts)
    for read, error in ((check_file, HeaderError), (GGUFSource, WeightsError)):
        with pytest.raises(error, match=rf"m\.gguf: .*({words})"):
            read(path)
    with pytest.raises(PlanError, match=rf"--model: .*m\.gguf: .*({words})"):
        read_shape(str(path))
    with pytest.raises(HeaderError, match=words):
        main(path, tmp_path)


def test_a_tokenizer_is_not_converted_from_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as routers do it."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    path = _file(tmp_path, [_array("tokenizer.ggml.tokens", Type.UINT8, 2**40)], [])
    with pytest.raises(TokenizerError, match=r"can't be converted: .*m\.gguf: damaged: it claims 1,099,511,627,776"):
        tokenizer_directory(ModelFiles(path=path, name="m"))


def test_the_library_reads_the_same(tmp_path: Path) -> None:
    """Whatever is changed in a file: if it is read here, the library finds the same tensors in the same places."""
    path, changed = tmp_path / "whole.gguf", tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list([f"t{number}" for number in range(40)])
    for name, shape in (("a.weight", (4, 32)), ("b.weight", (64,)), ("c.bias", (2, 2, 8))):
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole, random = path.read_bytes(), Random(49)
    table = whole.index(b"a.weight")
    same = refused = 0
    for number in range(400):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(table - 8, table + 130) if number % 2 else random.randrange(24, table)
            data[place] = random.choice((0, 1, 2, 8, 32, 64, 255, data[place] ^ 1 << random.randrange(8)))
        changed.write_bytes(data)
        try:
            header = _read(changed)
        except HeaderError:
            refused += 1
            continue
        try:
            theirs = {
                each.name: (each.tensor_type, tuple(int(n) for n in each.shape)[::-1], each.data_offset, each.n_bytes)
                for each in gguf.GGUFReader(changed).tensors
            }
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError):
            continue
        ours = {name: (each.kind, each.shape, each.offset, each.num_bytes) for name, each in header.tensors.items()}
        assert ours == theirs
        same += 1
    assert min(same, refused) > 50
