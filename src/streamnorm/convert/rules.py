"""Which rule makes a norm of ours of a module: of this call, registered, or of ours."""

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, overload

from torch import nn

from ..engine.compat import torch_norm_base
from ..nn.base import Norm
from .known import BY_FORWARD, NO_MEAN, Factory, is_rms, known_reason, known_rule
from .making import Make
from .reporting import Reason
from .trying import tried_rule

Rules = Mapping[type[nn.Module], Factory]
Given = TypeVar("Given", bound=Factory)

NORMS = (torch_norm_base, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, Norm)
HOW = "rules={cls: factory} for this call, or streamnorm.convert.register(cls, factory)"
COMPUTED = Reason(
    "its gain or bias is computed from other parameters (parametrized, pruned)", "make that permanent, then convert"
)
NAMED = re.compile(r"Norm(?!al(?!i[sz]))")  # "LayerNorm" and "Normalize", not "NormalEstimator"

_registered: dict[type[nn.Module], Factory] = {}


class Decorator(Protocol):
    """What `register` is without a factory."""

    def __call__(self, factory: Given, /) -> Given: ...


@overload
def register(cls: type[nn.Module], factory: Given) -> Given: ...


@overload
def register(cls: type[nn.Module]) -> Decorator: ...


def register(cls: type[nn.Module], factory: Any = None) -> Any:
    """Tell `convert` what becomes of a class of norms, from now on; also a decorator, `@convert.register(cls)`.

    It holds for subclasses too, if they have no `forward` or `train` of their own. The last one that is registered
    counts, before ours.

    Args:
        cls: the class of the old norm.
        factory: called as `factory(old, make)`. It returns the new module, or a text that says why the old one stays,
            or None, and changes nothing of the old one. `make(num_features, eps=..., channel_dim=..., weight=...,
            bias=..., mean=..., var=...)` makes the norm that the call of `convert` asked for; `make.norm` and
            `make.settings` are what it was given.

    Example:
        >>> import torch
        >>> from streamnorm import convert
        >>> class ScaleNorm(nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(size))
        ...
        ...     def forward(self, x):
        ...         return self.gain * x / x.std()
        >>> @convert.register(ScaleNorm)
        ... def scale_norm(old, make):
        ...     return make(len(old.gain), weight=old.gain)
        >>> convert(nn.Sequential(ScaleNorm(3)), report=None)
        Sequential(
          (0): StreamingNorm(3)
        )
    """
    if factory is None:
        return lambda given: register(cls, given)
    check_rule("convert.register", cls, factory)
    _registered[cls] = factory
    return factory


def check_rules(rules: Rules | None) -> Rules:
    """The rules of a call of `convert`."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules={rules!r}: pass a dict of classes and factories, {{OtherNorm: factory}}")
    for cls, factory in rules.items():
        check_rule("rules", cls, factory)
    return rules


def check_rule(place: str, cls: object, factory: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{place}: {cls!r} is no class of modules: pass the class of the norm, a subclass of nn.Module")
    if not callable(factory):
        raise TypeError(
            f"{place}: {factory!r} for {cls.__name__} cannot be called: pass a function (old, make) -> module"
        )


def rule_for(old: nn.Module, rules: Rules) -> Factory | Reason | None:
    """What is to be done with a module: a rule, or why it stays, or None if it is no norm."""
    kind, refused = type(old), None
    for base in kind.__mro__:
        if issubclass(base, nn.Module):
            rule = rules.get(base) or _registered.get(base) or known_rule(base)
            reason = rule and _differs(kind, base)
            if rule is not None and reason is None:
                return rule
            refused = refused or reason
    if isinstance(old, Norm):
        return Reason("it is streamnorm's already")
    if not isinstance(old, NORMS) and not _looks_like_a_norm(old):
        return refused
    return refused or known_reason(kind) or _torch_rule(old)


def _torch_rule(old: nn.Module) -> Factory | Reason:
    """For torch's own, and for classes that only rename them."""
    kind = type(old)
    if kind.forward not in BY_FORWARD:
        return tried_rule(old) or _why_unknown(old)
    if kind.train is not nn.Module.train:
        return Reason("its class decides by itself when it trains, by a train() of its own", HOW)
    if old._modules or set(old._parameters) - {"weight", "bias"}:
        return COMPUTED
    return BY_FORWARD[kind.forward]


def _why_unknown(old: nn.Module) -> Reason:
    if is_rms(old):
        return NO_MEAN
    if isinstance(old, NORMS):
        return Reason("its class computes something else than torch's, by a forward of its own", HOW)
    return Reason("there is no rule for its class", HOW)


def applied(factory: Factory, old: nn.Module, make: Make) -> nn.Module | Reason:
    """What a rule answers, checked."""
    new: object = factory(old, make)
    if new is None or new is old:
        return Reason("its rule leaves it")
    if isinstance(new, str) and new:
        return Reason(new)
    if not isinstance(new, nn.Module | Reason):
        name = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"the rule {name} for {type(old).__name__} returned {new!r}: a rule returns an nn.Module, a text that says "
            "why the old one stays, or None"
        )
    return new


def _differs(kind: type[nn.Module], base: type[nn.Module]) -> Reason | None:
    """Why the rule for a class does not hold for one that inherits from it."""
    for name in ("forward", "train"):
        if getattr(kind, name) is not getattr(base, name):
            return Reason(f"its class has a {name} of its own, and the rule is for {base.__name__}", HOW)
    return None


def _looks_like_a_norm(module: nn.Module) -> bool:
    """By its name; what holds layers, norms or a whole network is none itself."""
    home = type(module).__module__
    if not NAMED.search(type(module).__name__) or home.startswith(("streamnorm.", "torch.")):
        return False
    inside = [part for part in module.modules() if part is not module and not isinstance(part, nn.PReLU)]
    return not any(part._parameters or isinstance(part, NORMS) for part in inside)
