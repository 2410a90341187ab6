"""Tensors of a request and of a response: raw, or as typed contents."""

from collections.abc import Mapping, Sequence

from protos import kserve_pb2 as pb
from router.errors import InvalidRequest

_LENGTH_BYTES = 4


class Inputs:
    """The inputs of one request, of one element each; every one must be known."""

    def __init__(self, request: pb.ModelInferRequest, known: Mapping[str, str]) -> None:
        """known: datatype by name. Raises InvalidRequest."""
        raw = request.raw_input_contents
        self.is_raw = bool(raw)
        if raw and len(raw) != len(request.inputs):
            raise InvalidRequest(
                f"raw_input_contents has {len(raw)} entries, inputs has {len(request.inputs)}: give as many, or none"
            )
        self._values: dict[str, bytes | bool] = {}
        for i, tensor in enumerate(request.inputs):
            datatype = known.get(tensor.name)
            if datatype is None:
                raise InvalidRequest(f"inputs[{i}].name={tensor.name[:100]!r}: use {', '.join(known)}")
            if tensor.datatype != datatype:
                raise InvalidRequest(f"input {tensor.name}: datatype={tensor.datatype[:20]!r}: use {datatype}")
            if tensor.name in self._values:
                raise InvalidRequest(f"input {tensor.name} comes twice: give each once")
            if any(length != 1 for length in tensor.shape):
                raise InvalidRequest(f"input {tensor.name}: shape={list(tensor.shape)[:8]}: one element, so [1]")
            read = _read_bytes if datatype == "BYTES" else _read_bool
            self._values[tensor.name] = read(tensor.name, raw[i] if raw else None, tensor.contents)

    def text(self, name: str) -> str | None:
        """None if there is none. Raises InvalidRequest."""
        value = self._values.get(name)
        if value is None:
            return None
        assert isinstance(value, bytes)
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input {name} is no UTF-8 at byte {error.start}") from None

    def flag(self, name: str) -> bool | None:
        """None if there is none."""
        value = self._values.get(name)
        assert not isinstance(value, bytes)
        return value


def add_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str], *, raw: bool) -> None:
    """Adds an output of BYTES. raw: as the request's inputs were."""
    output = response.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        response.raw_output_contents.append(
            b"".join(len(each).to_bytes(_LENGTH_BYTES, "little") + each for each in elements)
        )
    else:
        output.contents.bytes_contents.extend(elements)


def _read_bytes(name: str, raw: bytes | None, contents: pb.InferTensorContents) -> bytes:
    if raw is None:
        if len(contents.bytes_contents) != 1:
            raise InvalidRequest(f"input {name} has {len(contents.bytes_contents)} bytes_contents: give one")
        return contents.bytes_contents[0]
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if len(raw) != _LENGTH_BYTES + length:
        raise InvalidRequest(f"input {name} has {len(raw)} raw bytes: give its length in 4 bytes, then so many")
    return raw[_LENGTH_BYTES:]


def _read_bool(name: str, raw: bytes | None, contents: pb.InferTensorContents) -> bool:
    if raw is None:
        if len(contents.bool_contents) != 1:
            raise InvalidRequest(f"input {name} has {len(contents.bool_contents)} bool_contents: give one")
        return contents.bool_contents[0]
    if len(raw) != 1:
        raise InvalidRequest(f"input {name} has {len(raw)} raw bytes: a BOOL is one")
    return raw != b"\0"
