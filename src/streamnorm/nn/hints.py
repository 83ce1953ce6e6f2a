"""What a constructor says about arguments that it does not take, such as those of torch's norms."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from reprlib import repr as shortened
from typing import Any, TypeVar

from torch.nn.modules.lazy import LazyModuleMixin

Kind = TypeVar("Kind", bound=type)

FOREIGN = {
    "momentum": "GeneralBatchNorm averages with a momentum; in StreamingNorm alpha= and kappa= weigh the past",
    "track_running_stats": "StreamingNorm and GeneralBatchNorm always keep statistics, SampleNorm never does",
    "elementwise_affine": "use affine=",
    "bias": "affine=False leaves out gain and bias together",
    "normalized_shape": "num_features is the number of channels; channel_dim=-1 says that they come last",
    "num_channels": "use num_features",
    "num_groups": "ref='SP1' of SampleNorm is one group of channels, 'SP2' a group for each",
    "process_group": "StreamingNorm alone merges over processes",
    "proj_size": "the hidden state is not projected; an nn.Linear behind the layer projects its output",
    "steps": "TimeSpecificNorm alone has estimates per timestep",
}


def hinted(kind: Kind) -> Kind:
    """Let the constructor of a class explain why it does not take an argument. Its signature stays as it is."""
    init: Callable[..., None] = kind.__init__  # type: ignore[misc]

    @wraps(init)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            words = _why_not(kind, init, args, kwargs)
            if words is None:
                raise
        else:
            return
        raise TypeError(words)

    kind.__init__ = explained  # type: ignore[misc]
    return kind


def _why_not(kind: type, init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call does not fit the signature, if this is about an argument too many."""
    taken = list(signature(init).parameters.values())[1:]
    names = [each.name for each in taken]
    if "num_features" not in names and (args or "num_features" in kwargs) and issubclass(kind, LazyModuleMixin):
        return f"{kind.__name__}() finds num_features at its first call: leave it out, or use the norm that is not lazy"
    foreign = [name for name in kwargs if name not in names]
    if foreign:
        return f"{kind.__name__}() takes " + "; ".join(f"no {name}=: {_instead(name, names)}" for name in foreign)
    placed = [each.name for each in taken if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) <= len(placed):
        return None
    given, rest = ", ".join(map(shortened, args)), [f"{name}=" for name in names if name not in placed]
    rest.sort(key=lambda name: name != "eps=")  # what is meant as a rule: it comes second in torch's norms
    return (
        f"{kind.__name__}() takes {', '.join(placed)} by position, and was given {given}: "
        f"pass the rest by name: {', '.join(rest)}"
    )


def _instead(name: str, names: list[str]) -> str:
    if name in FOREIGN:
        return FOREIGN[name]
    meant = get_close_matches(name, names, 1, 0.7)
    return f"did you mean {meant[0]}=?" if meant else f"it takes {', '.join(names)}"
