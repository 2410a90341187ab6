"""The machine as checks see it, and the lines that they yield."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from configs.options import Options
from kernels.native.cores import num_usable_cores
from octavo.cluster.runtime_files import child_environment
from octavo.doctor.probe import READERS, Reading
from octavo.lab.nvidia_smi import NvidiaSmiError, nvidia_smi

# PyTorch's import takes a second, and minutes from a cold network disk.
PROBE_TIMEOUT = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_FIELDS = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    """A GPU as nvidia-smi lists it; memory in bytes."""

    name: str
    total: int
    free: int
    driver: str
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuListing:
    """error: why nvidia-smi lists nothing; empty if there is no nvidia-smi, or if it works."""

    gpus: tuple[ListedGpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The values that several checks share, read once each."""

    options: Options
    probe_timeout: float = PROBE_TIMEOUT

    @property
    def num_workers(self) -> int:
        return self.options.data_parallel_size * self.options.world_size

    @property
    def num_cores(self) -> int:
        """The number of threads that can compute at once."""
        return num_usable_cores()

    @property
    def on_gpu(self) -> bool:
        """True if workers would compute on a GPU. Where PyTorch gives no answer, nvidia-smi's counts."""
        if self.options.device != "auto":
            return self.options.device == "cuda"
        torch = self.readings["torch"].torch
        return bool(self.listing.gpus if torch is None else torch.gpus)

    @cached_property
    def listing(self) -> GpuListing:
        return list_gpus()

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """The probe's readings, by reader; one that was not made has the reason as its error."""
        return _run_probe(self.options, self.probe_timeout)


def list_gpus() -> GpuListing:
    """Asks nvidia-smi."""
    try:
        answer = nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    except NvidiaSmiError as error:
        return GpuListing(error=str(error))
    if answer is None:
        return GpuListing()
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(answer.splitlines()) if row]
        gpus = tuple(
            ListedGpu(name=name, total=_mib(total), free=_mib(free), driver=driver, capability=capability)
            for name, total, free, driver, capability in rows
        )
    except ValueError:
        return GpuListing(error=f"it lists a GPU as {answer.strip().splitlines()[0]!r}")
    return GpuListing(gpus=gpus)


def _mib(text: str) -> int:
    return int(text) * 2**20


def _run_probe(options: Options, timeout: float) -> dict[str, Reading]:
    # -P: modules in the current directory are not ours. The same Octavo as here, installed or not.
    command = [sys.executable, "-P", "-m", "octavo.doctor.probe"]
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(_ROOT))))
    try:
        result = subprocess.run(
            command,
            input=json.dumps(options.as_file()).encode(),
            env=environment,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        answers, failure = result.stdout, _ending(result.returncode, result.stderr)
    except subprocess.TimeoutExpired as error:
        answers, failure = error.stdout or b"", f"it does not end within {timeout:g} s"
    # The last line is cut if the process ended within it.
    lines = answers.splitlines()[: answers.count(b"\n")]
    found = {reading.reader: reading for reading in map(Reading.model_validate_json, lines)}
    return {name: found.get(name) or Reading(reader=name, error=failure) for name in READERS}


def _ending(code: int, stderr: bytes) -> str:
    """Says how the probe ended, with the last line it wrote."""
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    how = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return f"{how} ({lines[-1].strip()})" if lines else how


def cpu_name() -> str:
    """Returns the name in /proc/cpuinfo, or "CPU" where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else "CPU"


class State(StrEnum):
    """How a subject is. OK: nothing to do. NOTE: a cluster runs, but could run better. PROBLEM: a cluster with these
    options does not start, fails later, or is several times slower than it should be."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A result. advice: what to do; empty exactly if the state is OK."""

    subject: str
    state: State
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.state is State.OK) == (not self.advice), self


def ok(subject: str, found: str) -> Check:
    return Check(subject=subject, state=State.OK, found=found)


def note(subject: str, found: str, advice: str) -> Check:
    return Check(subject=subject, state=State.NOTE, found=found, advice=advice)


def problem(subject: str, found: str, advice: str) -> Check:
    return Check(subject=subject, state=State.PROBLEM, found=found, advice=advice)


def gib(num_bytes: float) -> str:
    """Formats bytes, as "1.5 GiB" or "12 MiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
