"""Surgery on a model: where its modules are, and one module in the place of another."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from ..engine.compat import move_hooks, uncompiled
from ..nn.encoders import leave_fast_path

Report = Callable[[str], object] | None
Skip = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

# By the names of classes, so that nothing has to be imported to look for them.
REFUSED = {
    "DataParallel": "pass model.module, and wrap the result",
    "DistributedDataParallel": "pass model.module, and wrap the result",
    "FullyShardedDataParallel": "do it before sharding",
    "FSDPModule": "do it before sharding",
    "ScriptModule": "do it before torch.jit",
}


class Place(NamedTuple):
    """Where a module stands; the model itself has no parent."""

    parent: nn.Module | None
    key: str
    name: str  # from the root, dotted


Places = dict[nn.Module, list[Place]]


def opened(model: nn.Module, caller: str, inplace: bool) -> nn.Module:
    """The module to work on: checked, without the wrapper of torch.compile, and a copy unless `inplace`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: model is {type(model).__name__}: pass an nn.Module")
    for name, module in model.named_modules():
        for kind in {base.__name__ for base in type(module).__mro__} & set(REFUSED):
            which = f"its {name}" if name else "it"
            raise ValueError(f"{caller}: cannot change this model, {which} is a {kind}: {REFUSED[kind]}")
    model = uncompiled(model)
    if inplace:
        return model
    groups = [getattr(module, "process_group", None) for module in model.modules()]
    return copy.deepcopy(model, {id(group): group for group in groups if group is not None})


def returned(model: nn.Module, root: nn.Module, changed: nn.Module, inplace: bool) -> nn.Module:
    """What the caller gets: the same object, wrapper included, if it was changed in place and not replaced itself."""
    return model if inplace and changed is root else changed


def find_places(model: nn.Module) -> Places:
    """Every module of the model, once, and all the places in which it stands."""
    found: Places = {module: [] for module in model.modules()}
    found[model].append(Place(None, "", ""))
    for name, parent in model.named_modules(remove_duplicate=False):  # a shared module has several names
        for key, child in parent._modules.items():
            if child is not None:
                found[child].append(Place(parent, key, f"{name}.{key}" if name else key))
    return found


def names_of(places: list[Place]) -> str:
    return ", ".join(place.name or "(model)" for place in places)


def title(norm: nn.Module) -> str:
    shape = getattr(norm, "normalized_shape", None)
    inside = ", ".join(map(str, shape)) if shape else getattr(norm, "num_features", getattr(norm, "num_channels", ""))
    return f"{type(norm).__name__}({inside})" if inside != "" else type(norm).__name__


def say(report: Report, lines: list[str], model: nn.Module, nothing: str = "norm to replace") -> None:
    for line in lines or [f"{type(model).__name__} has no {nothing}"]:
        if report is not None:
            report(line)


def is_compiled(places: list[Place]) -> bool:
    """Whether a module was compiled by itself: the compiled code would not notice that it is replaced."""
    return any(type(place.parent).__name__ == "OptimizedModule" for place in places)


def swap(model: nn.Module, places: Places, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put the replacements, which take over mode and hooks, into all places; returns the model."""
    for old, new in replacements.items():
        new.train(old.training)
        move_hooks(old, new)
        for place in places[old]:
            if place.parent is not None:
                place.parent._modules[place.key] = new
    replaced = set(replacements.values())
    for parent in places:
        for name, child in parent.named_children():
            leave_fast_path(parent, name, child, replaced.__contains__)
    return replacements.get(model, model)


def skipped_by(skip: Skip, places: Places, kinds: tuple[type[nn.Module], ...]) -> set[nn.Module]:
    """The modules to leave alone; naming one means everything in it. A function is asked about those of `kinds`."""
    if skip is None:
        return set()
    named = [(place.name, module) for module, where in places.items() for place in where]
    if callable(skip):
        return {module for name, module in named if isinstance(module, kinds) and skip(name, module)}
    patterns = [skip] if isinstance(skip, str) else list(skip)
    chosen = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip={skip!r}: pass names or patterns of modules, or a function (name, module) -> bool")
        found = {m for name, m in named if any(fnmatchcase(part, pattern) for part in _prefixes(name))}
        if not found:
            raise ValueError(f"skip={pattern!r} names no module of the model: see model.named_modules()")
        chosen |= found
    return chosen


def _prefixes(name: str) -> Iterator[str]:
    """A name and those of the modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]
