"""A model's norms become ours: the same parameters, mode, hooks and places, and the statistics it was trained with."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..core.config import is_number
from ..engine.compat import torch_norm_base
from ..engine.merging import WORLD
from ..nn.base import Norm
from ..nn.batch import GeneralBatchNorm, TimeSpecificNorm
from ..nn.streaming import StreamingNorm
from .places import (
    Place,
    Report,
    Skip,
    find_places,
    is_compiled,
    names_of,
    opened,
    returned,
    say,
    skipped_by,
    swap,
    title,
)

Model = TypeVar("Model", bound=nn.Module)

NORMS = (torch_norm_base, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, Norm)
KNOWN = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.LayerNorm, nn.GroupNorm)
FORWARDS = {kind.forward for kind in KNOWN}
# How many dimensions the inputs of an old norm have.
DIMS = {
    nn.BatchNorm1d: 1,  # two or three
    nn.BatchNorm2d: 4,
    nn.BatchNorm3d: 5,
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}


def convert(
    model: Model,
    norm: Callable[..., nn.Module] = StreamingNorm,
    *,
    inplace: bool = True,
    skip: Skip = None,
    report: Report = print,
    **settings: Any,
) -> Model:
    """Replace torch's batch, layer, group and instance norms in a model by `norm`.

    The Parameter objects stay, so that an optimizer goes on working; so do device, dtype, mode, hooks and sharing. A
    trained batch norm hands its running statistics over, without a new warm-up: evaluation does not change. Other
    norms have none to give, so there the first training calls begin the statistics. If anything is refused, the model
    is as it was.

    Args:
        model: any module; a norm itself is returned converted.
        norm: called as `norm(num_features, eps=..., affine=..., channel_dim=..., device=..., dtype=..., **settings)`.
        inplace: False changes a copy.
        skip: what to leave alone: a name or pattern of modules, several, or a function `(name, module) -> bool`.
        report: gets a line for each norm.
        settings: further arguments of `norm`, which win over what is taken from the old norm.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> model = convert(model, p=1)
        1: BatchNorm2d(8) -> StreamingNorm(8)
    """
    if not callable(norm):
        raise TypeError(f"norm={norm!r}: pass a class such as StreamingNorm, or a function that makes a norm")
    if isinstance(norm, partial):
        norm, settings = partial(norm.func, *norm.args), norm.keywords | settings
        norm = norm if norm.args else norm.func
    root = opened(model, "convert", inplace)
    places = find_places(root)
    skipped = skipped_by(skip, places, NORMS)
    replacements: dict[nn.Module, nn.Module] = {}
    lines = []
    for old, where in places.items():
        if isinstance(old, NORMS):
            reason = _why_not(old, where, skipped)
            if reason is None:
                try:
                    replacements[old], remark = _made(old, norm, settings, _first_tensor(root))
                except Exception as error:
                    error.add_note(f"convert: while replacing {names_of(where)}; the model is as it was")
                    raise
                outcome = f"-> {title(replacements[old])}{remark}"
            else:
                outcome = f"left alone: {reason}"
            lines.append(f"{names_of(where)}: {title(old)} {outcome}")
    changed = swap(root, places, replacements)
    say(report, lines, root)
    return cast(Model, returned(model, root, changed, inplace))


def _why_not(old: nn.Module, places: list[Place], skipped: set[nn.Module]) -> str | None:
    """Why a norm stays as it is, if it does."""
    if old in skipped:
        return "skipped"
    if isinstance(old, Norm):
        return "it is streamnorm's already"
    if isinstance(old, nn.RMSNorm):
        return "it subtracts no mean, so it is no kin of a streaming norm"
    if isinstance(old, LazyModuleMixin):
        raise ValueError(
            f"convert: {names_of(places)} is a {type(old).__name__} without a size yet: run one batch through the "
            "model first"
        )
    if is_compiled(places):
        return "it was compiled by itself: convert before torch.compile"
    if type(old).forward not in FORWARDS or "forward" in vars(old):
        return "its class computes something else than torch's, by a forward of its own"
    if type(old).train is not nn.Module.train:
        return "its class decides by itself when it trains, by a train() of its own"
    if old._modules or set(old._parameters) - {"weight", "bias"}:
        return "its gain or bias is computed from other parameters (parametrized, pruned)"
    if isinstance(old, nn.LayerNorm) and len(old.normalized_shape) > 1:
        return f"it normalizes over several dimensions, {tuple(old.normalized_shape)}, and not over channels alone"
    return None


def _made(old: nn.Module, norm: Callable[..., nn.Module], settings: Any, like: Tensor | None) -> tuple[nn.Module, str]:
    """The replacement, and a remark for the report. The old norm is only read."""
    own = [old._parameters.get("weight"), old._parameters.get("bias"), old._buffers.get("running_mean")]
    like = next((tensor for tensor in own if tensor is not None), like)
    given: dict[str, Any] = {
        "eps": old.eps,
        "affine": own[0] is not None or own[1] is not None,
        "channel_dim": -1 if isinstance(old, nn.LayerNorm) else 1,
        "device": None if like is None else like.device,
        "dtype": None if like is None else like.dtype,
    }
    kind = norm if isinstance(norm, type) else object
    if issubclass(kind, GeneralBatchNorm | TimeSpecificNorm) and is_number(getattr(old, "momentum", None)):
        given["momentum"] = old.momentum
    new = norm(_features(old), **(given | settings))
    if not isinstance(new, nn.Module):
        raise TypeError(f"norm made {type(new).__name__}: it must make an nn.Module")
    if isinstance(new, StreamingNorm) and isinstance(old, nn.SyncBatchNorm) and "process_group" not in settings:
        new.process_group = new.process_group or old.process_group or WORLD
    _keep_parameters(old, new)
    if not isinstance(new, Norm):
        return new, ""
    dims = next((dims for kind, dims in DIMS.items() if isinstance(old, kind)), None)
    if dims is not None:
        new._remember(dims)
    remark = _start(new, old)
    if isinstance(new, StreamingNorm) and not new.affine:
        remark += " (without parameters: streamnorm.attach tells it of weight updates)"
    return new, remark


def _keep_parameters(old: nn.Module, new: nn.Module) -> None:
    names = [name for name in ("weight", "bias") if getattr(new, name, None) is not None]
    kept = {name: old._parameters.get(name) for name in names}
    if all(parameter is None for parameter in kept.values()):
        return  # asked for with affine=True, in place of a norm that had no gain
    for name, parameter in kept.items():
        if parameter is not None and parameter.shape != getattr(new, name).shape:
            shapes = tuple(getattr(new, name).shape), tuple(parameter.shape)
            raise ValueError(f"norm made a {name} of shape {shapes[0]}, but {title(old)} has one of shape {shapes[1]}")
        setattr(new, name, parameter)


def _start(new: Norm, old: nn.Module) -> str:
    """Hand running statistics over, if there are any; returns a remark where that cannot be done."""
    mean, variance = old._buffers.get("running_mean"), old._buffers.get("running_var")
    if mean is None or variance is None or mean.is_meta:
        return ""
    if new._stored is None:
        return " (keeps no statistics)"
    if getattr(new, "mean").shape != mean.shape:  # noqa: B009
        return f" (its statistics start afresh: {new.ref} has no place for one per channel)"
    wide = torch.promote_types(variance.dtype, torch.float32)  # in which torch takes the root
    state = {"running_mean": mean, "running_var": variance.to(wide), "num_batches_tracked": old.num_batches_tracked}
    # Sigma with the eps that it was trained with, so that evaluation does not change; the new eps serves from now on.
    eps, new.eps = new.eps, cast(float, old.eps)
    new.load_state_dict(state, strict=False)
    new.eps = eps
    return ""


def _features(norm: nn.Module) -> int:
    for name in ("num_features", "num_channels"):
        if hasattr(norm, name):
            return cast(int, getattr(norm, name))
    return cast(int, norm.normalized_shape[-1])  # type: ignore[index]


def _first_tensor(model: nn.Module) -> Tensor | None:
    """For type and place of norms that have no tensor of their own."""
    return next((t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()), None)
