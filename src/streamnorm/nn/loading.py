"""What a state_dict may hold: numbers that a norm could have left there, or those of an nn.BatchNorm."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..core.algorithm import FULL
from ..core.state import State

BATCHNORM_KEYS = ("running_mean", "running_var", "num_batches_tracked")


def fault(values: Tensor, least: float = -inf, above: float = -inf) -> str | None:
    """What is wrong with a tensor, if anything: it must be finite, at least `least`, and larger than `above`.

    Tensors without values here are not looked into: meta ones, and subclasses such as fake or distributed tensors.
    """
    if type(values) not in (Tensor, nn.Parameter) or values.is_meta:
        return None
    wrong = ~values.isfinite() | (values < least) | (values <= above)
    if not wrong.any():
        return None
    bounds = [f" and at least {least:g}"] * (least > -inf) + [f" and above {above:g}"] * (above > -inf)
    return f"holds {values[wrong].flatten()[0].item()!r}: must be finite{''.join(bounds)}"


def variance(sigma: Tensor, eps: float) -> Tensor:
    """What stands in `running_var` for a sigma."""
    return sigma.square() - eps


def spread(variance: Tensor, eps: float) -> Tensor:
    """The sigma of a `running_var`."""
    return (variance + eps).sqrt()


def sigma_fault(sigma: Tensor, eps: float) -> str | None:
    """The same for a sigma, which eps keeps from 0."""
    return fault(sigma, above=0) if eps else fault(sigma, least=0)


def is_batchnorm(state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether it has the statistics of an `nn.BatchNorm`, and not, beside them, those of a norm of ours."""
    has = [prefix + name in state_dict for name in ("running_mean", "running_var", "mean")]
    return has == [True, True, False]


def batchnorm_faults(state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """What is wrong with the statistics of an `nn.BatchNorm`, by key."""
    least = dict(zip(BATCHNORM_KEYS, (-inf, 0.0, 0.0), strict=True))
    keys = [name for name in BATCHNORM_KEYS if state_dict.get(prefix + name) is not None]
    found = {prefix + name: fault(state_dict[prefix + name], least[name]) for name in keys}
    return [f"{key} {words}" for key, words in found.items() if words]


def estimate_faults(state_dict: Mapping[str, Any], prefix: str, eps: float) -> list[str]:
    """The same for the running estimates of our own batch norms, and for what they can be loaded from."""
    if is_batchnorm(state_dict, prefix):
        return batchnorm_faults(state_dict, prefix)
    mean, sigma = state_dict.get(prefix + "mean"), state_dict.get(prefix + "sigma")
    found = {"mean": mean is not None and fault(mean), "sigma": sigma is not None and sigma_fault(sigma, eps)}
    return [f"{prefix}{name} {words}" for name, words in found.items() if words]


def batchnorm_statistics(state_dict: Mapping[str, Any], prefix: str, eps: float) -> tuple[Tensor, Tensor] | None:
    """Mean and sigma from the state_dict of an `nn.BatchNorm`; None if it never saw data."""
    mean, variance = state_dict[prefix + "running_mean"], state_dict[prefix + "running_var"]
    tracked = state_dict.get(prefix + "num_batches_tracked")
    # The counter alone says little: it stays 0 in an InstanceNorm, and where an old checkpoint had none.
    if tracked is not None and int(tracked) == 0 and not mean.any() and bool((variance == 1).all()):
        return None
    return mean, spread(variance, eps)


def started(fresh: State, statistics: Tensor, seen: float) -> State:
    """A state whose streams begin with `statistics`, `(2, C)`, as if so many elements had been `seen`.

    They count as one full window: what is streamed has other averages, of sigma and of smaller batches, and soon takes
    over.
    """
    ended = torch.zeros_like(fresh.stats.empty)
    stats = replace(fresh.stats, long=statistics.clone(), short=statistics.clone(), empty=ended)
    mean, sigma = statistics
    state = replace(fresh, stats=stats, mean=mean.clone(), sigma=sigma.clone(), seen=fresh.seen + seen)
    state = replace(state, counted=torch.full_like(state.seen, FULL), eval_long=statistics.clone())
    return replace(state, eval_mean=mean.clone(), eval_sigma=sigma.clone())
