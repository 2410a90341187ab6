"""The GPUs of this machine that a tuner may use."""

from importlib.metadata import version

import torch

from octavo.bench.tune.problem import Device, TuneError


def visible_device() -> Device:
    """All visible GPUs. Raises TuneError if there is none, or if they are of different kinds."""
    if not torch.cuda.is_available():
        raise TuneError(
            "--tune measures on GPUs, and torch sees none here (CUDA_VISIBLE_DEVICES leaves some out, a CPU build of "
            "torch all): run it on a machine that has one"
        )
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        raise TuneError(
            f"--tune: the visible GPUs are {', '.join(names)}: let CUDA_VISIBLE_DEVICES name some of one kind, for "
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
    """What times depend on, besides the kernel."""
    return {"device": device.name, "torch": version("torch"), "triton": version("triton")}
