"""GPUs and their driver."""

import re
from collections import Counter
from collections.abc import Iterator

from octavo.doctor.machine import Check, Machine, gib, note, ok, problem

# The oldest driver that runs programs of a CUDA major version:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_OR_CPU = "or serve with device=cpu"


def check_gpu(machine: Machine) -> Iterator[Check]:
    """Compares the GPUs that nvidia-smi lists with those that PyTorch can use."""
    device, listing, torch = machine.options.device, machine.listing, machine.readings["torch"].torch
    if listing.error:
        worse = note if device == "cpu" else problem
        yield worse("GPU", f"nvidia-smi fails: {listing.error}", f"reinstall NVIDIA's driver and reboot, {_OR_CPU}")
    elif not listing.gpus:
        if device == "cuda":
            advice = "install NVIDIA's driver; in a container, pass the GPU in (docker run --gpus all)"
            yield problem("GPU", "device=cuda, and there is no nvidia-smi here", f"{advice}; {_OR_CPU}")
        else:
            yield ok("GPU", "none (no nvidia-smi on PATH): workers compute on the CPU")
    elif device == "cpu":
        yield ok("GPU", f"{_names(machine)}; not used, for device=cpu")
    elif torch is None:
        yield note("GPU", f"{_names(machine)}; not known if PyTorch finds it", "repair PyTorch, see below")
    elif torch.cuda is None:
        worse = problem if device == "cuda" else note
        advice = "install PyTorch's CUDA build: GPU=1 make install, or pip install -c constraints/cuda.txt torch"
        yield worse("GPU", f"{_names(machine)}; not used: PyTorch is a CPU build", advice)
    elif torch.gpu_error or not torch.gpus:
        found = f"{_names(machine)}; PyTorch finds none: {torch.gpu_error or 'CUDA_VISIBLE_DEVICES hides it'}"
        yield problem("GPU", found, f"update the driver, or set CUDA_VISIBLE_DEVICES, {_OR_CPU}")
    else:
        yield ok("GPU", f"{_names(machine)}; PyTorch sees {len(torch.gpus)}")


def check_driver(machine: Machine) -> Iterator[Check]:
    """Compares the driver with the CUDA version of PyTorch."""
    gpus, torch = machine.listing.gpus, machine.readings["torch"].torch
    if not gpus:
        return
    driver, cuda = gpus[0].driver, None if torch is None else torch.cuda
    if cuda is None:
        yield ok("driver", driver)
        return
    oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    number = re.match(r"\d+", driver)
    if oldest and number and int(number[0]) < oldest:
        found = f"{driver} is too old for PyTorch's CUDA {cuda}, which needs {oldest} or newer"
        worse = problem if machine.options.device != "cpu" else note
        yield worse("driver", found, f"install driver {oldest} or newer, {_OR_CPU}")
    else:
        yield ok("driver", f"{driver}, for PyTorch's CUDA {cuda}")


def _names(machine: Machine) -> str:
    gpus = machine.listing.gpus
    counts = Counter((gpu.name, gpu.total) for gpu in gpus)
    names = [f"{count} x {name} ({gib(total)})" for (name, total), count in counts.items()]
    return f"{', '.join(names)}, {gib(min(gpu.free for gpu in gpus))} free"
