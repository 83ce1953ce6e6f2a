"""Which layer feeds which norm, by tracing a model with torch.fx; what cannot be traced is taken as a whole."""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from inspect import Parameter, signature
from itertools import product
from operator import attrgetter
from typing import Any

from torch import fx, nn

from ..engine.context import evaluating
from ..nn.base import Norm
from ..nn.recurrent.base import RecurrentBase
from .deploy import FixedAffine
from .reporting import Reason
from .standardize import LAYERS
from .uses import ARGUMENTS, BEYOND, FEEDS_OTHERS, NO_LAYER, WEIGHT_READ, Use, computes_as_torch

LEAVES = (Norm, FixedAffine, RecurrentBase)
GIVEN = object()  # an argument that is there, whatever it is
MOST_OPTIONAL = 4  # arguments of a forward that is traced with and without each of them


def traced_uses(model: nn.Module) -> tuple[list[Use], set[nn.Module]]:
    """The uses of layers and norms in what can be traced, and the modules that cannot.

    Where a part is traced by itself, what is beyond its edge is not known: such a use is `BEYOND`.
    """
    # Forward methods run with symbols for tensors, and may keep them: not in the model itself.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = deepcopy(model, shared)
    original: dict[nn.Module | None, nn.Module] = dict(zip(twin.modules(), model.modules(), strict=True))
    opaque: set[nn.Module] = set()
    with evaluating(twin):
        uses = [use for module, graph in _graphs(twin, opaque) for use in _uses(module, graph, module is not twin)]
    found = [Use(original.get(layer), original.get(norm), why) for layer, norm, why in uses]
    return found, {original[module] for module in opaque}


def _uses(module: nn.Module, graph: fx.Graph, is_part: bool) -> Iterator[Use]:
    called = {node: module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    for node in graph.nodes:
        if node.op == "get_attr":  # a parameter that is read by itself, of whichever of the modules that share it
            read = attrgetter(str(node.target))(module)
            owners = [part for part in module.modules() if any(own is read for own in part._parameters.values())]
            yield from (Use(owner, None, WEIGHT_READ) for owner in owners)
        here = called.get(node)
        if isinstance(here, Norm):
            source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
            layer = called.get(source) if isinstance(source, fx.Node) else None
            yield Use(layer, here) if isinstance(layer, LAYERS) else Use(None, here, _why_no_layer(source, is_part))
        elif isinstance(here, LAYERS):
            users = [called.get(user) for user in node.users]
            if len(users) != 1 or not isinstance(users[0], Norm):
                leaves = is_part and all(user.op == "output" for user in node.users)
                yield Use(here, None, BEYOND if leaves else FEEDS_OTHERS)


def _why_no_layer(source: Any, is_part: bool) -> Reason:
    if not isinstance(source, fx.Node):
        return ARGUMENTS
    return BEYOND if is_part and source.op == "placeholder" else NO_LAYER


def _graphs(module: nn.Module, opaque: set[nn.Module]) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """The module traced, or else its parts; what cannot be traced is added to `opaque`."""
    traced = _trace(module, opaque)
    if traced is None:
        for child in module.children():
            if _is_container(child) or not _Tracer(opaque).is_leaf_module(child, ""):
                yield from _graphs(child, opaque)
        traced = _trace(module, opaque)  # now around the parts that cannot be
    for graph in traced or []:
        yield module, graph
    if traced is None and not _is_container(module):
        opaque |= {module, *_reached_into(module)}


def _is_container(module: nn.Module) -> bool:
    """Whether it only holds modules, and has no forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _reached_into(module: nn.Module) -> Iterator[nn.Module]:
    """What a forward that nobody saw may take apart: lists, and sequences, whose parts it may call one by one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
            yield from _reached_into(child)


def _trace(module: nn.Module, opaque: set[nn.Module]) -> list[fx.Graph] | None:
    """Graphs of the module's forward, with each optional argument given and not given; None if it cannot be traced."""
    if _is_container(module) or isinstance(module, LEAVES) or "forward" in vars(module):
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
        known = m in self.opaque or isinstance(m, LEAVES) or computes_as_torch(m)
        whole = known or (isinstance(m, LAYERS) and not m._modules)
        leaf = whole or super().is_leaf_module(m, module_qualified_name)
        if leaf and m._modules:
            self.opaque.add(m)
        return leaf
