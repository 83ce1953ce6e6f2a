"""Norms folded into the layers before them for the time of a comparison: does the model give the same?"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..nn.base import Norm
from .deploy import constants, run_example
from .places import Places
from .standardize import TRANSPOSED
from .uses import tensors_in

Pairs = dict[nn.Module, Norm]  # layers, and the norms that they feed


class Trial:
    """What a model gives for an example, and for another one like it, before and after norms are folded.

    Args:
        model: as it is before; it is changed for the time of a comparison alone.
        places: of its modules.
        example: as in `fuse`.
        before: what the model gives for it.
        pairs: those that are folded in any case.
    """

    def __init__(self, model: nn.Module, places: Places, example: Any, before: Any, pairs: Pairs) -> None:
        self.model, self.places, self.pairs = model, places, pairs
        self.cases = [(example, before)]

    def widen(self) -> None:
        """Take the negated example too: other numbers may take other branches. A model need not serve them."""
        other = _negated(self.cases[0][0])
        with suppress(Exception):  # of the model's own code
            case = (other, run_example(self.model, other))
            self.cases.append(case)
            if not self.holds():
                self.cases.remove(case)

    def holds(self, pairs: Pairs | None = None) -> bool:
        """Whether the results are the same, with these norms folded as well."""
        with _folded_for_now(self.places, self.pairs | (pairs or {})):
            return all(is_close(before, run_example(self.model, example)) for example, before in self.cases)

    def accepted(self, pairs: Pairs) -> Pairs:
        """Those of the pairs with which the results are the same: all of them, or else of each half, and so on."""
        good: Pairs = {}
        groups = [list(pairs.items())]
        while groups:
            group = groups.pop()
            if self.holds(good | dict(group)):
                good.update(group)
            elif len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return good


def _negated(example: Any) -> Any:
    """With other numbers, where they are numbers and not names of something."""
    if isinstance(example, Tensor):
        return -example if example.is_floating_point() else example
    if isinstance(example, Mapping):
        return {key: _negated(value) for key, value in example.items()}
    return type(example)(map(_negated, example)) if type(example) in (tuple, list) else example


@contextmanager
def _folded_for_now(places: Places, pairs: Pairs) -> Iterator[None]:
    """The model with these norms folded, and as it was afterwards."""
    kept = {layer: dict(layer._parameters) for layer in pairs}
    folded = {layer: folded_parameters(layer, norm) for layer, norm in pairs.items()}
    holders = [(cast(nn.Module, place.parent), place.key, norm) for norm in pairs.values() for place in places[norm]]
    try:
        for layer in pairs:
            layer._parameters.update(folded[layer])
        for parent, key, _ in holders:
            parent._modules[key] = nn.Identity()
        yield
    finally:
        for layer in pairs:
            layer._parameters.clear()
            layer._parameters.update(kept[layer])
        for parent, key, norm in holders:
            parent._modules[key] = norm


def folded_parameters(layer: nn.Module, norm: Norm) -> dict[str, nn.Parameter]:
    """Weight and bias of the layer and the norm in one."""
    (scale,), (shift,) = constants(norm)
    weight, bias = cast(Tensor, layer.weight).detach(), cast(Tensor | None, layer.bias)
    if isinstance(layer, TRANSPOSED):  # (in, out / groups, *kernel)
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        scales = scale.reshape(layer.groups, 1, -1, *(1 for _ in weight.shape[2:]))
        folded = (grouped * scales).reshape(weight.shape)
    else:  # (out, ...)
        folded = weight * scale.reshape(-1, *(1 for _ in weight.shape[1:]))
    total = shift if bias is None else shift + bias.detach() * scale
    learns = cast(nn.Parameter, layer.weight).requires_grad
    return {
        "weight": nn.Parameter(folded.to(weight.dtype), learns),
        "bias": nn.Parameter(total.to(weight.dtype), learns if bias is None else bias.requires_grad),
    }


def is_close(before: Any, after: Any) -> bool:
    """Whether two results are the same but for rounding, as far as they are tensors."""
    one, other = list(tensors_in(before)), list(tensors_in(after))
    return len(one) == len(other) and all(map(_are_close, one, other))


def _are_close(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape:
        return False
    if not (before.is_floating_point() or before.is_complex()):
        return torch.equal(before, after)
    finite = before.detach()[before.isfinite()].abs()  # some models mask with infinities
    scale = float(finite.max()) if finite.numel() else 0.0
    return before.allclose(after.to(before.dtype), rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
