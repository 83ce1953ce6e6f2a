"""F and G alone, on vectors, for the compiler: a launch each. And what the kernels serve at all."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import center_of
from ...core.config import Config, Statistic
from ...core.reference import CODES
from ...core.state import Stream, from_h1
from .. import Measured, unknown_settings
from . import launch

# Triton reads the same variable when it is imported: kernels are then run by NumPy, for tests on any machine.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
DEVICE = "cpu" if INTERPRETED else "cuda"  # which is what torch calls AMD's too


def unserved(config: Statistic) -> str | None:
    """Which setting is not served, in a few words."""
    reasons = {
        f"it has p = 1 and 2, not {config.p:g}": config.p not in (1, 2),
        "it has one statistic per channel (BA1)": config.ref != CODES["BA1"],
        "a setting is new to it": unknown_settings(config, (*launch.KNOWN, "ref")),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class Streams:
    def declines(self, config: Config, dtype: torch.dtype, device: str, masked: bool) -> str | None:
        reasons = {
            f"it serves the device {DEVICE}, not {device}": device != DEVICE,
            "its statistics are in float32": dtype != torch.float32,
            "it takes no mask": masked,
            unserved(config) or "": unserved(config),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def center(self, config: Config, latest: Tensor, seen: Tensor, mean: Tensor, present: Tensor | None) -> Tensor:
        return center_of(config, latest, seen, mean, present)

    def forward(self, config: Config, h1: Sequence[Tensor], s: Measured, memo: Any) -> Tensor:
        own = s.mean.reshape(-1).contiguous(), s.sigma.reshape(-1).contiguous()
        counts: tuple[Any, Any] = s.elements, s.samples  # numbers: there is no mask
        kept = launch.push_statistics(config, from_h1(h1), *own, *counts, s.begins)
        return kept[3 * s.channels :].clone()  # s_hat and the numbers

    def backward(self, config: Config, h2: Sequence[Tensor], kept: Tensor, g: Tensor, memo: Any) -> Tensor:
        return launch.push_gradients(config, Stream(*h2), kept, g[0].contiguous(), g[1].contiguous(), None)
