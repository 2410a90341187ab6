"""gRPC ignores options that it does not know, so a misspelled one would have no effect and no error."""

import re
from pathlib import Path

from grpc._cython import cygrpc

from tests.support.repository import files, name

_OPTION = re.compile(r'"(grpc\.[a-z0-9_.]+)", ')


def test_grpc_knows_each_option() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    used = {(option, name(path)) for path in files(".py") for option in _OPTION.findall(path.read_text())}
    assert len(used) > 20
    assert not [each for each in used if each[0].encode() not in library]
