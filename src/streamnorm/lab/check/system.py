"""What a report has to say about the machine, so that somebody else can make sense of it."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ... import __version__, backends
from ..devices import called, capability, present

PACKAGES = "numpy triton pytorch-triton-rocm pytorch-triton-xpu"  # beside torch, that may be there

VARIABLES = (
    *("STREAMNORM_BACKEND", "STREAMNORM_PLAIN", "TRITON_INTERPRET"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ENABLE_MPS_FALLBACK"),
)


def about() -> dict[str, Any]:
    devices = {name: torch.device(name) for name in present()}
    missing = {name: backend.missing() for name, backend in backends.registered().items()}
    return {
        "streamnorm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES.split() if (found := _version(name))},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "rocm": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # not on Windows
        "devices": {name: f"{called(device)} {capability(device)}".strip() for name, device in devices.items()},
        "backends": missing,
        "details": {name: backends.registered()[name].details() for name in missing if not missing[name]},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def lines(told: dict[str, Any]) -> list[str]:
    packages = {name: told[name] for name in ("streamnorm", "torch", "python")} | told["packages"]
    built = {name: told[name] for name in ("cuda", "rocm") if told[name]}
    found = [
        ", ".join(f"{name} {value}" for name, value in packages.items()),
        ", ".join([told["system"], *(f"built for {name} {value}" for name, value in built.items())]),
        f"{told['threads']} threads, {told['cores']} cores" + (f", load {told['load']:.1f}" if told["load"] else ""),
        *(f"device {name}: {words}" for name, words in told["devices"].items()),
        *(f"{name}={value}" for name, value in told["environment"].items()),
    ]
    for name, missing in told["backends"].items():
        words = (
            f"cannot be used here: {missing}" if missing else ", ".join(filter(None, ["there", told["details"][name]]))
        )
        found.append(f"backend {name}: {words}")
    return found
