"""How a network is doing: numbers in the log by which a bad end can be traced to its beginning."""

import math
from typing import Any

import torch
from torch import nn

from .. import monitor
from ..engine.compat import foreach_norm


class GradientNorm:
    """The length of the gradient that an update uses, taken only when `wanted`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wanted, self.norm = False, math.nan
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self.wanted:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.norm = float(torch.linalg.vector_norm(torch.stack(list(foreach_norm(gradients)))))


def health(model: nn.Module, gradient: float) -> dict[str, float]:
    """`gradient`: length of the latest gradient. `sigma_min`, `sigma_max`: over all statistics kept. `drift`: the
    largest relative difference between the long- and the short-term sigma of a streaming layer."""
    found: dict[str, float] = {"gradient": gradient}
    kept = [getattr(module, "sigma", None) for module in model.modules()]
    sigmas = [sigma.detach() for sigma in kept if isinstance(sigma, torch.Tensor) and sigma.numel()]
    if sigmas:
        found["sigma_min"] = min(float(sigma.min()) for sigma in sigmas)
        found["sigma_max"] = max(float(sigma.max()) for sigma in sigmas)
    layers = monitor(model)
    if layers:
        found["drift"] = max(layer.drift_sigma for layer in layers.values())
    return found
