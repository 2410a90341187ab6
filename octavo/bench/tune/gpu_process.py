"""The tuner's side of a process that measures on one GPU: it sends a line of JSON and reads a line of JSON.

Each GPU has its own process, so that neither Python's lock nor a crashed CUDA context affects the other GPUs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from kernels.triton_common.tuned_tiles import Tile
from octavo.bench.tune.problem import Device, Measurement, Problem
from octavo.lab.errors import TuningError

# Time for a process that has closed its pipes to end.
_END_S = 10.0


def visible_device() -> Device:
    """All visible GPUs. Raises TuningError if there is none, or if they are of different kinds."""
    if not torch.cuda.is_available():
        raise TuningError(
            "--tune measures on GPUs, and torch sees none here (CUDA_VISIBLE_DEVICES may hide them; a CPU build of "
            "torch sees none): run it on a machine that has one"
        )
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        raise TuningError(
            f"--tune: the visible GPUs are {', '.join(names)}: set CUDA_VISIBLE_DEVICES to GPUs of one kind, because "
            "their times go into one file"
        )
    properties = torch.cuda.get_device_properties(0)
    return Device(
        name=names[0],
        num_gpus=len(names),
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
    )


def measured_with(device: Device) -> dict[str, str]:
    """The versions and device that times depend on, besides the kernel."""
    return {"device": device.name, "torch": version("torch"), "triton": version("triton")}


MEASURE_COMMAND = (sys.executable, "-m", "octavo.bench.tune.measure")


def visible_gpu(number: int, environment: Mapping[str, str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for the number-th of the GPUs that are visible now."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return str(number) if visible is None else visible.split(",")[number].strip()


class GpuProcess:
    """A process that is started when first needed, and again after a tile that crashed it."""

    def __init__(self, number: int, command: Sequence[str] = MEASURE_COMMAND) -> None:
        """number: the GPU's index among the visible ones."""
        self._command = command
        self._environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpu(number, os.environ)}
        self._process: subprocess.Popen[str] | None = None

    def measure(self, M: int, shape: Problem, tile: Tile) -> Measurement:
        """Measures one tile; if the process ends instead of answering, that is the tile's error.

        Raises TuningError if no process can be started.
        """
        process = self._process or self._start()
        answer = self._ask(process, {"op": shape.op, "M": M, "shape": shape.fields(), "tile": tile.as_json()})
        if answer is None:
            self.close()
            return Measurement(microseconds=None, error=f"the process ended with status {process.returncode}")
        if answer["is_last"]:
            self.close()
        return Measurement(microseconds=answer["microseconds"], error=answer["error"])

    def close(self) -> None:
        """Kills the process, even while it measures."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                # Unsent data no longer matters.
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _start(self) -> subprocess.Popen[str]:
        # In a session of its own: Ctrl-C interrupts the tuner, which then ends its processes.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self._process = process
        if self._ask(process, {}) is None:
            self.close()
            raise TuningError(
                f"GPU {self._environment['CUDA_VISIBLE_DEVICES']}: {' '.join(self._command)} ended with status "
                f"{process.returncode} before it measured anything; its output is above"
            )
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any] | None:
        """Asks a question. Returns None if the process ended; an empty question waits until it is ready."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            _end(process)
            return None
        line = process.stdout.readline()
        if not line:
            _end(process)
            return None
        return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Waits for a process that has closed its pipes, and kills it if it stays."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
