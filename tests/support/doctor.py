"""Machines for tests of `octavo doctor`, and the faults put in their way."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.options import Options
from octavo.doctor.machine import Check, Machine, State
from octavo.doctor.probe import ModelFacts, Reading, TorchFacts
from tests.support.up import environment

GIB = 2**30
MODEL = ModelFacts(name="small", quantization="none", weight_bytes=GIB, block_bytes=2**20, block_size=16, context=8192)


def machine(torch: TorchFacts | None = None, model: ModelFacts = MODEL, **options: Any) -> Machine:
    """A machine of which the probe has said this; everything else is read from the real one."""
    found = Machine(options=Options(**options))
    vars(found)["readings"] = {
        "torch": Reading(reader="torch", torch=torch or TorchFacts()),
        "kernels": Reading(reader="kernels", kernels="avx2"),
        "refusal": Reading(reader="refusal", refusal=""),
        "model": Reading(reader="model", model=model),
    }
    return found


def only(checks: Iterator[Check], state: State) -> Check:
    (found,) = checks
    assert found.state is state, found
    return found


def in_child(program: str, *arguments: str, before: Any = None, wrapped: tuple[str, ...] = ()) -> str:
    """The output of a Python program in a process of its own in which the fault is."""
    result = subprocess.run(
        [*wrapped, sys.executable, "-c", program, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def executable(file: Path, script: str) -> None:
    file.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    file.chmod(0o700)
