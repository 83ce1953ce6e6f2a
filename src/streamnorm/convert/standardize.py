"""Weight standardization (Qiao et al. 2019): every output filter of a layer has mean 0 and variance 1 over its fan-in.

It is a parametrization of torch's: the raw weight is what is trained and saved, the standardized one what is used.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..core.config import is_number
from .places import Place, Places, Report, find_places, names_of, opened, say, skipped_by

Model = TypeVar("Model", bound=nn.Module)
Skip = str | nn.Module | Iterable[str | nn.Module] | Callable[[str, nn.Module], bool] | None

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
FORWARDS = {kind.forward for kind in LAYERS}
NOTHING = "weight to standardize"


class Standardized(nn.Module):
    """W -> scale * (W - mean) / sqrt(var + eps), over the fan-in of each output filter.

    Args:
        eps: added to the variance.
        groups: None if the output filter is the first dimension of the weight; else the number of groups of a
            transposed convolution, whose weight is `(in, out / groups, *kernel)`.
        scale: one number for the layer, a constant that is saved; None: 1.

    Example:
        >>> Standardized(eps=1e-12)(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """

    scale: Tensor | None

    def __init__(self, eps: float = 1e-5, groups: int | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        check_eps(eps)
        self.eps, self.groups = float(eps), groups
        self.register_buffer("scale", scale)

    def forward(self, raw: Tensor) -> Tensor:
        # A layer norm without gain and bias, over the filters: one kernel, and float32 inside of half precision.
        filters, dims = _filters(raw, self.groups)
        standardized = F.layer_norm(filters, filters.shape[dims:], eps=self.eps).to(raw.dtype)
        if self.groups is not None:
            standardized = torch.cat(standardized.transpose(1, 2).unbind())
        return standardized if self.scale is None else standardized * self.scale

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is assigned to the weight of the layer becomes the raw weight."""
        return weight

    def extra_repr(self) -> str:
        told = {"groups": self.groups, "scale": self.known_scale}
        return f"eps={self.eps:g}" + "".join(f", {name}={value:g}" for name, value in told.items() if value is not None)

    @property
    def known_scale(self) -> float | None:
        """None where there is none, or on the meta device."""
        return None if self.scale is None or self.scale.is_meta else float(self.scale)


def weight_standardize(
    model: Model, *, eps: float = 1e-5, keep_scale: bool = False, skip: Skip = None, report: Report = print
) -> Model:
    """Standardize the weights of linear layers and (transposed) convolutions: mean 0 and variance 1 in each filter.

    The model is changed in place. Its Parameter objects stay, so that an optimizer goes on working; they are now the
    raw weights, `layer.parametrizations.weight.original`, and `layer.weight` is computed from them. The scale of the
    weights is lost, so each such layer should feed a norm: skip the output layer, and where a residual branch ends in a
    layer without one use `keep_scale`. Layers with one weight per filter and those whose weight is computed from other
    parameters are left alone. If anything is refused, the model is as it was.

    Args:
        model: any module.
        eps: added to the variance of a filter.
        keep_scale: give all filters of a layer the variance that they have now on average, in the place of 1.
        skip: what to leave alone: a module, a name or pattern, several of them, or a function
            `(name, module) -> bool`; everything in a module that is named is left alone.
        report: gets a line for each layer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8, 10))
        >>> model = weight_standardize(model, skip="3")
        0: Conv2d standardized over 27 weights per filter
        3: Linear left alone: skipped
    """
    check_eps(eps)
    if not isinstance(keep_scale, bool):
        raise TypeError(f"keep_scale={keep_scale!r}: must be True or False")
    root = opened(model, "weight_standardize", inplace=True)
    places = find_places(root)
    skipped = _skipped(skip, places)
    chosen, lines = [], []
    for layer, where in places.items():
        if isinstance(layer, LAYERS):
            reason = "skipped" if layer in skipped else _why_not(layer, where, keep_scale)
            if reason is None:
                chosen.append(layer)
                outcome = f"standardized over {_fan_in(layer)} weights per filter"
            else:
                outcome = f"left alone: {reason}"
            lines.append(f"{names_of(where)}: {_kind(layer)} {outcome}")
    for layer in chosen:
        groups = _groups(layer)
        scale = (_variance(layer) + eps).sqrt().to(layer.weight.dtype) if keep_scale else None
        parametrize.register_parametrization(layer, "weight", Standardized(eps, groups, scale))
    say(report, lines, root, NOTHING)
    return model


def remove_weight_standardization(model: Model, *, report: Report = print) -> Model:
    """Give the raw weights back: the model, changed in place, is as it was before `weight_standardize`.

    To keep the standardized weights instead, use `fuse`, or
    `torch.nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)`.

    Args:
        model: any module.
        report: gets a line for each layer.

    Example:
        >>> layer = weight_standardize(nn.Linear(4, 8), report=None)
        >>> remove_weight_standardization(layer)
        (model): Linear has its raw weight again
        Linear(in_features=4, out_features=8, bias=True)
    """
    root = opened(model, "remove_weight_standardization", inplace=True)
    places = find_places(root)
    layers = [layer for layer in places if _standardization_of(layer) is not None]
    for layer in layers:
        if not _is_alone(layer):
            raise ValueError(
                f"remove_weight_standardization: the weight of {names_of(places[layer])} has further parametrizations, "
                "and torch removes all or none: remove them by torch.nn.utils.parametrize.remove_parametrizations"
            )
    lines = [f"{names_of(places[layer])}: {_kind(layer)} has its raw weight again" for layer in layers]
    for layer in layers:
        _take_off(layer)
    say(report, lines, root, "standardized weight")
    return model


def bake(places: Places) -> list[str]:
    """Standardized weights become ordinary ones, new Parameter objects; returns what to say about it."""
    layers = [layer for layer in places if _is_alone(layer)]
    baked: dict[tuple[Any, ...], nn.Parameter] = {}  # weights that were one stay one
    made = []
    for layer in layers:
        standardization = cast(Standardized, _standardization_of(layer))
        raw = _raw(layer)
        key = id(raw), standardization.eps, standardization.groups, standardization.known_scale
        if key not in baked:
            with torch.no_grad():
                baked[key] = nn.Parameter(standardization(raw.detach()), raw.requires_grad)
        made.append(baked[key])
    for layer, weight in zip(layers, made, strict=True):
        _take_off(layer)
        layer.weight = weight
    return [f"{names_of(places[layer])}: weight standardization folded into the weights" for layer in layers]


def _take_off(layer: nn.Module) -> None:
    # Torch takes the property off the class, which deep copies share with their original: theirs is to stay.
    kind = type(layer)
    layer.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def check_eps(eps: float) -> None:
    if not (is_number(eps) and eps > 0):
        raise ValueError(f"eps={eps!r}: must be a finite number above 0, or a filter of equal weights would become NaN")


def _why_not(layer: nn.Module, places: list[Place], keep_scale: bool) -> str | None:
    """Why a layer stays as it is, if it does."""
    if isinstance(layer, LazyModuleMixin):
        raise ValueError(
            f"weight_standardize: {names_of(places)} is a {_kind(layer)} without a size yet: run one batch through the "
            "model first"
        )
    if _standardization_of(layer) is not None:
        return "it is standardized already"
    if type(layer).forward not in FORWARDS or "forward" in vars(layer):
        return "its class computes something else than torch's, by a forward of its own"
    if layer._parameters.get("weight") is None or parametrize.is_parametrized(layer, "weight"):
        return "its weight is computed from other parameters (parametrized, pruned)"
    if not cast(Tensor, layer.weight).is_floating_point():
        return f"its weight is of type {layer.weight.dtype}"
    if _fan_in(layer) < 2:
        return f"it has {_fan_in(layer)} weight(s) per filter, of which nothing would be left"
    if keep_scale and not layer.weight.is_meta and not _variance(layer) > 0:
        return "the weights of each filter are equal, so that there is no scale to keep"
    return None


def _groups(layer: nn.Module) -> int | None:
    return layer.groups if isinstance(layer, TRANSPOSED) else None


def _filters(weight: Tensor, groups: int | None) -> tuple[Tensor, int]:
    """The output filters, and the first of the dimensions that are their own."""
    if groups is None:
        return weight, 1
    # Groups are stacked and concatenated, not reshaped: of that the compiler makes views in backward, for other
    # strides than the gradients of convolutions and layer norms have.
    return torch.stack(weight.chunk(groups)).transpose(1, 2), 2  # (groups, out / groups, in / groups, *kernel)


def _variance(layer: nn.Module) -> Tensor:
    """That of a filter, on average."""
    weight = cast(Tensor, layer.weight).detach()
    filters, dims = _filters(weight.to(torch.promote_types(weight.dtype, torch.float32)), _groups(layer))
    return filters.flatten(dims).var(-1, correction=0).mean()


def _fan_in(layer: nn.Module) -> int:
    shape = cast(Tensor, layer.weight).shape
    if isinstance(layer, TRANSPOSED):
        return int(shape[0] // layer.groups * shape[2:].numel())
    return int(shape[1:].numel())


def _parametrizations(layer: nn.Module) -> list[nn.Module]:
    if not parametrize.is_parametrized(layer, "weight"):
        return []
    return list(cast(Any, layer.parametrizations)["weight"])


def _standardization_of(layer: nn.Module) -> Standardized | None:
    return next((each for each in _parametrizations(layer) if isinstance(each, Standardized)), None)


def _is_alone(layer: nn.Module) -> bool:
    return [type(each) for each in _parametrizations(layer)] == [Standardized]


def _raw(layer: nn.Module) -> Tensor:
    return cast(Tensor, cast(Any, layer.parametrizations)["weight"].original)


def _kind(layer: nn.Module) -> str:
    return parametrize.type_before_parametrizations(layer).__name__


def _skipped(skip: Skip, places: Places) -> set[nn.Module]:
    """The modules to leave alone, with everything in those that are named or given."""
    if isinstance(skip, nn.Module):
        skip = [skip]
    if skip is None or isinstance(skip, str) or callable(skip):
        return skipped_by(skip, places, LAYERS)
    if not isinstance(skip, Iterable):
        raise TypeError(f"skip={skip!r}: pass modules, names or patterns of modules, or a function")
    each = list(skip)
    given = [module for module in each if isinstance(module, nn.Module)]
    for module in given:
        if module not in places:
            raise ValueError(f"skip has a {_kind(module)} that is no module of the model: see model.named_modules()")
    inside = {part for module in given for part in module.modules()}
    return inside | skipped_by(cast(Any, [name for name in each if name not in given]), places, LAYERS)
