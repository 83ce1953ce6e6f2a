"""`fuse`: norms folded into the convolution or linear layer before them, found by tracing the model with torch.fx."""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from inspect import Parameter, signature
from itertools import product
from operator import attrgetter
from typing import Any, TypeVar, cast

from torch import Tensor, fx, nn

from ..engine.compat import HOOKS
from ..engine.context import evaluating
from ..nn.base import Norm
from ..nn.batch import TimeSpecificNorm
from ..nn.recurrent.base import RecurrentBase
from .deploy import FixedAffine, constants, deployed, run_example
from .places import Places, Report, find_places, names_of, opened, returned, say, swap, title
from .standardize import bake

Model = TypeVar("Model", bound=nn.Module)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
LEAVES = (Norm, FixedAffine, RecurrentBase)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which have no forward
GIVEN = object()  # an argument that is there, whatever it is
MOST_OPTIONAL = 4  # arguments of a forward that is traced with and without each of them


def fuse(model: Model, *, example: Any = None, inplace: bool = False, report: Report = print) -> Model:
    """A copy of a model for deployment whose norms are folded into the convolution or linear layer before them.

    That is done where a layer feeds the norm and nothing else, and the norm has no location; the norm becomes
    `nn.Identity`. The other norms become what `to_batchnorm` makes of them. Weights that `weight_standardize` computes
    become ordinary ones first. Evaluation is the same.

    Args:
        model: a model with norms of streamnorm.
        example: as in `to_batchnorm`.
        inplace: True changes the model itself; folded layers get new Parameter objects.
        report: gets a line for each norm, and for each weight that was standardized.

    Example:
        >>> from streamnorm import StreamingNorm
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), StreamingNorm(8), nn.ReLU())
        >>> fused = fuse(model.eval())
        1: StreamingNorm(8) folded into 0
    """
    root = opened(model, "fuse", inplace)
    before = run_example(root, example)
    baked = bake(find_places(root))
    places = find_places(root)  # a layer that was parametrized has lost what it held
    replacements, lines = deployed(root, places)
    folded: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for layer, norm in _pairs(root, places).items():
        if norm not in replacements:  # it computes something else
            continue
        folded[layer] = _folded(layer, norm)
        replacements[norm] = nn.Identity()
        lines[norm] = f"{names_of(places[norm])}: {title(norm)} folded into {names_of(places[layer])}"
    changed = swap(root, places, replacements)
    for layer, parameters in folded.items():
        for name, parameter in parameters.items():
            setattr(layer, name, parameter)
    if not _is_close(before, run_example(changed, example)):
        raise RuntimeError(
            "fuse: the model gives something else for the example than before, so it uses a folded layer in a way that "
            "tracing did not see: use to_batchnorm" + (", and load the weights again" if inplace else "")
        )
    say(report, [*baked, *lines.values()], root)
    return cast(Model, returned(model, root, changed, inplace))


def _is_close(before: Any, after: Any) -> bool:
    """Whether two results are the same but for rounding, as far as they are tensors."""
    if isinstance(before, Tensor):
        scale = float(before.detach().abs().max()) if before.numel() else 0.0
        same_shape = before.shape == after.shape
        return same_shape and before.allclose(after.to(before.dtype), rtol=1e-3, atol=1e-3 * scale, equal_nan=True)
    if isinstance(before, dict):
        return all(_is_close(value, after[key]) for key, value in before.items())
    if isinstance(before, tuple | list):
        return all(map(_is_close, before, after))
    return True


def _folded(layer: nn.Module, norm: Norm) -> dict[str, nn.Parameter]:
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


def _pairs(model: nn.Module, places: Places) -> dict[nn.Module, Norm]:
    """The layers into which a norm can be folded: in all that is known of the model, one feeds the other alone."""
    partners: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)  # None: a use that is no such pair
    uses, opaque = _traced_uses(model)
    hooked = [set(m.modules()) for m in model.modules() if any(getattr(m, hooks) for hooks in HOOKS)]
    for layer, norm in uses:
        if layer is not None:
            partners[layer].add(norm)
        if norm is not None:
            partners[norm].add(layer)
    pairs = {}
    for layer, known in partners.items():
        norm = next(iter(known))
        if isinstance(norm, Norm) and len(known) == 1 and partners[norm] == {layer} and _fits(layer, norm):
            # What a module holds whose forward could not be traced may have uses that nobody saw.
            holders = {place.parent for place in (*places[layer], *places[norm])}
            # A hook on what holds only one of the two, or is one of them, sees what goes from one to the other.
            heard = any((layer in inside) != (norm in inside) for inside in hooked)
            if holders.isdisjoint(opaque) and not heard:
                pairs[layer] = norm
    return pairs


def _fits(layer: nn.Module, norm: Norm) -> bool:
    """Whether the norm is one factor and one summand for each output channel of the layer."""
    if type(layer) not in LAYERS or "forward" in vars(layer):
        return False
    if norm._stored is None or norm.ref.located or isinstance(norm, TimeSpecificNorm):
        return False
    if isinstance(layer, nn.Linear):  # whose channels come last
        last = norm.channel_dim == -1 or norm._dims - {1} == {2}
        return last and layer.out_features == norm.num_features
    return norm.channel_dim == 1 and cast(int, layer.out_channels) == norm.num_features


Use = tuple[nn.Module | None, nn.Module | None]  # a layer and the norm that it feeds, or one of them alone


def _traced_uses(model: nn.Module) -> tuple[list[Use], set[nn.Module]]:
    """The uses of layers and norms in what can be traced, and the modules that cannot."""
    # Forward methods run with symbols for tensors, and may keep them: not in the model itself.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = deepcopy(model, shared)
    original: dict[nn.Module | None, nn.Module] = dict(zip(twin.modules(), model.modules(), strict=True))
    opaque: set[nn.Module] = set()
    with evaluating(twin):
        uses = [use for module, graph in _graphs(twin, opaque) for use in _uses(module, graph)]
    return [(original.get(a), original.get(b)) for a, b in uses], {original[module] for module in opaque}


def _uses(module: nn.Module, graph: fx.Graph) -> Iterator[Use]:
    called = {node: module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    for node in graph.nodes:
        if node.op == "get_attr":  # a parameter that is read by itself, of whichever of the modules that share it
            read = attrgetter(str(node.target))(module)
            yield from ((m, None) for m in module.modules() if any(own is read for own in m._parameters.values()))
        here = called.get(node)
        if isinstance(here, Norm):
            source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
            yield (called.get(source) if isinstance(source, fx.Node) else None), here
        elif isinstance(here, LAYERS):
            users = [called.get(user) for user in node.users]
            if len(users) != 1 or not isinstance(users[0], Norm):
                yield here, None


def _graphs(module: nn.Module, opaque: set[nn.Module]) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """The module traced, or else its parts; what cannot be traced is added to `opaque`."""
    traced = _trace(module, opaque)
    if traced is None:
        for child in module.children():
            if isinstance(child, CONTAINERS) or not _Tracer(opaque).is_leaf_module(child, ""):
                yield from _graphs(child, opaque)
        traced = _trace(module, opaque)  # now around the parts that cannot be
    for graph in traced or []:
        yield module, graph
    if traced is None and not isinstance(module, CONTAINERS):
        opaque |= {module, *_reached_into(module)}


def _reached_into(module: nn.Module) -> Iterator[nn.Module]:
    """What a forward that nobody saw may take apart: lists, and sequences, whose parts it may call one by one."""
    for child in module.children():
        if isinstance(child, (*CONTAINERS, nn.Sequential)):
            yield child
            yield from _reached_into(child)


def _trace(module: nn.Module, opaque: set[nn.Module]) -> list[fx.Graph] | None:
    """Graphs of the module's forward, with each optional argument given and not given; None if it cannot be traced."""
    if isinstance(module, (*CONTAINERS, *LEAVES)) or "forward" in vars(module):
        return None
    arguments = list(signature(module.forward).parameters.values())
    # Of those without a default, all but the input may be None.
    missing = {argument.name: None for argument in arguments[1:] if argument.kind is Parameter.POSITIONAL_OR_KEYWORD}
    given = {argument.name: argument.default for argument in arguments if argument.default is not Parameter.empty}
    optional = missing | given
    if len(optional) > MOST_OPTIONAL:
        return None
    choices = [(True, False) if isinstance(default, bool) else (default, GIVEN) for default in optional.values()]
    cases = [dict(zip(optional, values, strict=True)) for values in product(*choices)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that are taken for constants
            return [_Tracer(opaque).trace(module, {k: v for k, v in case.items() if v is not GIVEN}) for case in cases]
    except Exception:  # it is the model's own code that runs, on what are no tensors
        return None


class _Tracer(fx.Tracer):
    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = m in self.opaque or isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)
        if leaf and m._modules:
            self.opaque.add(m)
        return leaf
