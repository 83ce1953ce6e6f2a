"""What was seen of layers and norms, by tracing or by running a model, and whether one can be folded into the other."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..engine.compat import LAYER_METHODS
from ..nn.base import Norm
from ..nn.batch import TimeSpecificNorm
from .reporting import Reason
from .standardize import LAYERS

NO_LAYER = Reason("it does not follow a convolution or linear layer")
ARGUMENTS = Reason("it is called with more than its input")
FEEDS_OTHERS = Reason("the layer before it feeds more than this norm")
WEIGHT_READ = Reason("the weight of the layer before it is read elsewhere too")
SEVERAL = Reason("it follows several layers")
CHOSEN = Reason("between the layer and the norm the model decides by values")
KEPT = Reason("what goes from the layer to the norm is kept or returned as well")
BEYOND = Reason(
    "it is called in code that torch.fx cannot trace", "pass example=, an input: fuse then looks how it runs"
)


class Use(NamedTuple):
    """A call of a layer whose output is what a norm is called with; or of one of the two alone, and why so."""

    layer: nn.Module | None
    norm: nn.Module | None
    why: Reason | None = None


def computes_as_torch(layer: nn.Module) -> bool:
    """Whether a layer is one of torch's, or of a class that only renames them or makes them in another way."""
    kind = type(layer)
    base = next((base for base in LAYERS if isinstance(layer, base)), None)
    if base is None or "forward" in vars(layer):
        return False
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in LAYER_METHODS)


def why_unfit(norm: Norm) -> Reason | None:
    """Why a norm is not one factor and one summand for each channel, if it is not."""
    if isinstance(norm, TimeSpecificNorm):
        return Reason("it has statistics for each timestep")
    if norm.ref.located:
        return Reason("it has statistics for each location")
    return None


def why_apart(layer: nn.Module, norm: Norm) -> Reason | None:
    """Why a norm cannot be folded into the layer that feeds it, as far as these two are concerned."""
    if parametrize.is_parametrized(layer) or any(hasattr(type(layer), name) for name in ("weight", "bias")):
        return Reason("the weight of the layer before it is computed from other parameters")
    if not computes_as_torch(layer):
        return Reason("the class of the layer before it has a forward of its own")
    if layer._parameters.get("weight") is None or not {"weight", "bias"} <= set(layer._parameters):
        return Reason("weight or bias of the layer before it is no parameter")
    if isinstance(layer, nn.Linear):  # whose channels come last
        if norm.channel_dim != -1 and not norm._dims - {1}:
            return Reason("the number of dimensions of its input is not known", "pass example=, an input, for that")
        fits = layer.out_features == norm.num_features and (norm.channel_dim == -1 or norm._dims - {1} == {2})
    else:
        fits = norm.channel_dim == 1 and cast(int, layer.out_channels) == norm.num_features
    return None if fits else Reason("its channels are not those of the layer before it")


def tensors_in(found: Any) -> Iterator[Tensor]:
    """The tensors of what a function takes or returns."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors_in(value)
    elif isinstance(found, tuple | list):
        for value in found:
            yield from tensors_in(value)
    elif is_dataclass(found):
        for field in fields(found):
            yield from tensors_in(getattr(found, field.name, None))
