"""The committed protobuf code matches the .proto files; otherwise a changed field would not reach the wire."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT, files, is_generated


def generated_files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in files(under=root) if is_generated(path)}


def test_committed_code_matches_the_protos(tmp_path: Path):
    subprocess.run(
        [ROOT / "scripts" / "gen_protos.sh", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
        timeout=120,
    )
    fresh, committed = generated_files(tmp_path), generated_files(ROOT)
    assert fresh, "the script generated nothing"
    assert sorted(fresh) == sorted(committed)
    different = [name for name in fresh if fresh[name] != committed[name]]
    assert not different, f"{different} differ from the .proto files: run scripts/gen_protos.sh and commit its output"
