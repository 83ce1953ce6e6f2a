"""The devices of this machine: which there are, what they are called, and waiting for one."""

import platform
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DeviceError
from .runs import DEFAULT_DEVICE

ACCELERATORS = ("cuda", "xpu", "mps")  # ROCm's are called cuda too; what else torch knows is in torch.accelerator


def present() -> list[str]:
    """All that can be asked for: the first is the default."""
    kinds = dict.fromkeys(ACCELERATORS)
    found = getattr(torch, "accelerator", None)  # from torch 2.6 on
    if found is not None and found.is_available():
        kinds |= {found.current_accelerator().type: None}
    return [DEFAULT_DEVICE, *(f"{kind}:{i}" for kind in kinds for i in range(_module(kind).device_count()))]


def find(name: str) -> torch.device:
    """The device called `name`, such as "cuda" or "cuda:1", if it is there and can hold a tensor."""
    there = present()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or f"{device.type}:{device.index or 0}" not in {f"{there[0]}:0", *there}:
        raise DeviceError(f"no device called {name!r} here: there is {', '.join(there)} (torch {torch.__version__})")
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        words = str(error).strip().splitlines()[0]
        raise DeviceError(
            f"device {name!r} cannot be used ({words}): free it, or choose of {', '.join(there)}"
        ) from error
    return device


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of the device is done."""
    if device.type == "mps":  # there is one, and it takes no name
        torch.mps.synchronize()
    else:
        _module(device.type).synchronize(device)


def on_cpu(value: Any) -> Any:
    """A state_dict, or anything of that kind, that can be loaded anywhere. Whatever it was made of is left alone."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        moved = copy(value)  # with what torch hangs on it: the versions of modules
        moved.update((name, on_cpu(each)) for name, each in value.items())
        return moved
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


def called(device: torch.device) -> str:
    """What it is, in words: the model of the processor or of the accelerator."""
    if device.type == DEFAULT_DEVICE:
        return _processor()
    name = getattr(_module(device.type), "get_device_name", None)
    return str(name(device)) if name else device.type


def capability(device: torch.device) -> str:
    """As torch tells it; empty where it tells none."""
    found = getattr(_module(device.type), "get_device_capability", None)
    if found is None or device.type == DEFAULT_DEVICE:
        return ""
    value = found(device)
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _module(kind: str) -> Any:
    return getattr(torch, kind)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
