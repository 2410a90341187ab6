"""Invalid files cause documented errors, whatever is in them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import ConfigError, load_options
from configs.options import Options
from router.errors import Unauthenticated
from router.security.keys import Keys, KeysError
from router.text.chat_template import ChatTemplate, TemplateError
from scheduler.recording.records import RecordingError
from scheduler.recording.replay import replay
from tests.support.scheduler.recordings import record

SECRET = "5f0c1d6b1bb34a6aa1d4"
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(SECRET)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_entries = st.dictionaries(
    st.sampled_from(("name", "key", "sha256", "requests_per_minute", "tokens_per_minute", "priority", "admin", "x")),
    _values | st.sampled_from(("alice", SECRET, 7, True)),
)
_few = settings(max_examples=60, deadline=None)


def _objection(documented: type[Exception], read: Callable[[], object]) -> str:
    """The reader's error message; empty if it accepts the file. Undocumented exceptions are raised."""
    try:
        read()
    except documented as error:
        return str(error) or repr(error)
    return ""


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "file"
    path.touch(mode=0o600)
    return path


@_few
@given(content=st.lists(_entries, max_size=3) | _values, noise=st.binary(max_size=10), place=st.integers(0, 200))
def test_a_file_of_api_keys(path: Path, content: object, noise: bytes, place: int) -> None:
    data = yaml.safe_dump({"keys": content}).encode()
    path.write_bytes(data[:place] + noise + data[place:] if place < 100 else data)
    assert SECRET not in _objection(KeysError, lambda: Keys(path))


@pytest.fixture(scope="module", name="keys")
def _keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.touch(mode=0o600)
    path.write_text(f"keys: [{{name: a, key: {SECRET}}}]")
    return Keys(path)


@_few
@given(authorization=st.text(max_size=60), api_key=st.text(max_size=60))
def test_headers_that_hold_no_key(keys: Keys, authorization: str, api_key: str) -> None:
    with pytest.raises(Unauthenticated):
        keys.identify(authorization, api_key)


@_few
@given(
    content=st.dictionaries(st.sampled_from(sorted(Options.model_fields)) | st.text(max_size=8), _values, max_size=4),
    noise=st.binary(max_size=6),
)
def test_a_file_of_options(path: Path, content: dict[str, object], noise: bytes) -> None:
    path.write_bytes(yaml.safe_dump(content).encode() + noise)
    _objection(ConfigError, lambda: load_options(path, environ={}))


@_few
@given(source=st.text(alphabet="{}%#()[]|.'\" aifornd=+*\n", max_size=60))
def test_a_chat_template(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    _objection(TemplateError, lambda: ChatTemplate(source, {}).render(messages, add_generation_prompt=True))


@pytest.fixture(scope="module", name="trace")
def _trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("traces") / "trace"
    record(path, num_requests=4)
    return path.read_bytes()


@_few
@given(place=st.integers(0, 10_000), noise=st.binary(max_size=8), cut=st.booleans())
def test_a_trace(path: Path, trace: bytes, place: int, noise: bytes, cut: bool) -> None:
    place %= len(trace)
    path.write_bytes(trace[:place] + noise + (b"" if cut else trace[place + len(noise) :]))
    objection = _objection(RecordingError, lambda: replay([path]))
    assert not objection or str(path) in objection
