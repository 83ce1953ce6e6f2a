"""Ways to compute the same thing: what a backend is, which there are, and which one serves a call.

`plain` is the law, in plain torch; every other file or folder here replaces some of it where that is faster, and can be
deleted. Nothing outside of this folder names one of them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.config import Config, Statistic
from ..core.state import State, Stream
from .memory import is_ordinary, layout_of

PLAIN = "plain"


class Signature(NamedTuple):
    """What the choice depends on. Sizes do not count, and are not looked at."""

    config: Any  # a Statistic; a Config in a streaming layer
    dtype: torch.dtype  # of the input
    device: str  # the type of its device
    dims: int
    layout: str  # "planes": contiguous; "rows": channels lie side by side; "other"
    stored: torch.dtype  # of the statistics
    gain: torch.dtype | None
    bias: torch.dtype | None
    masked: bool
    ordinary: bool  # all are tensors with memory of their own on one device, read as they lie there
    compiled: bool  # inside of torch.compile
    streaming: bool  # `config` is a Config
    compute: torch.dtype  # of the arithmetic: the wider of the input's and the statistics', float32 at least


def signature_of(
    config: Statistic,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    stored: torch.dtype,
    compiled: bool = False,
) -> Signature:
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return Signature(
        config=config,
        dtype=x.dtype,
        device=x.device.type,
        dims=x.ndim,
        layout="other" if compiled else layout_of(x),
        stored=stored,
        gain=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        masked=mask is not None,
        ordinary=compiled or all(is_ordinary(tensor) and tensor.device == x.device for tensor in tensors),
        compiled=compiled,
        streaming=isinstance(config, Config),
        compute=torch.promote_types(x.dtype, stored),
    )


class H1(NamedTuple):
    """What the forward pass of a streaming call reads and writes."""

    state: State


class H2(NamedTuple):
    """What its backward pass reads and writes."""

    grads: Stream
    scale: Tensor | None = None  # of the loss, where a scaler is attached


# Of a forward pass: the output; tensors for autograd to keep, beside input, gain and mask, which are freed with the
# graph; and what is small and the call's own, so that no hook on saved tensors gets it.
Result = tuple[Tensor, tuple[Tensor | None, ...], Any]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of the input, the gain and the bias


class Backend(Protocol):
    """One way to compute a call. `forward` and `backward` get what `declines` and `prepare` have agreed to."""

    name: str
    rank: int  # the lowest that serves a call is chosen
    sequences: Any  # whole recurrent layers, see `cpu/sequence.py`; None where there is nothing of that kind
    streams: Any  # F and G alone, for the compiler, a `Streams`; None likewise

    @property
    def normalize(self) -> "Normalize | None":
        """A call with constant statistics; None likewise."""

    def missing(self) -> str | None:
        """Why it cannot be used in this process at all; None if it can."""

    def details(self) -> str:
        """What `streamnorm check` says of one that can be used; may be empty."""

    def declines(self, call: Signature) -> str | None:
        """Why it does not serve such calls, in a few words; None if it does."""

    def prepare(self, call: Signature, x: Tensor, weight: Any, bias: Any, state: State | None) -> Any:
        """What calls like this one have in common; None if it cannot serve this one after all."""

    def steady(self, prepared: Any) -> Callable[[Tensor, Any, Any], bool] | None:
        """What tells whether that still holds for an input, a gain and a bias: a steady call asks nothing else.

        None: every call is looked at anew.
        """

    def forward(self, plan: "Plan", x: Tensor, weight: Any, bias: Any, mask: Any, h1: Any, begins: bool) -> Result:
        """A training call. `h1`: an H1, which is written to; for other norms c of the p-th moment, or None."""

    def repeat(self, plan: "Plan", x: Tensor, weight: Any, bias: Any, mask: Any, kept: Any) -> Result:
        """The same call once more, from what it kept: nothing is streamed."""

    def backward(
        self, plan: "Plan", dy: Tensor, x: Tensor, weight: Any, mask: Any, saved: Any, kept: Any, h2: Any, needs: Any
    ) -> Gradients:
        """`h2`: an H2, which is written to; None for other norms. `needs`: which gradients are asked for."""

    def statistics(self, plan: "Plan", saved: Any) -> tuple[Tensor, ...]:
        """Of a norm that does not stream: mean and sigma of the mini-batch, and whether they may be averaged."""


class Measured(NamedTuple):
    """S(x) of a call, as F alone is given it."""

    mean: Tensor
    sigma: Tensor
    elements: Tensor | int  # per statistic: a number where it is the same for all
    present: Tensor | None  # with a mask, see `Moments`
    samples: Tensor | int
    channels: int
    begins: bool


class Streams(Protocol):
    """F and G on vectors. What F keeps for G is a vector: see `to_vector` of core/algorithm.py.

    `memo` is a layer's, for what may be remembered of its tensors.
    """

    def declines(self, config: Config, dtype: torch.dtype, device: str, masked: bool) -> str | None:
        """Why it does not serve statistics of this type; None if it does."""

    def center(self, config: Config, latest: Tensor, seen: Tensor, mean: Tensor, present: Tensor | None) -> Tensor:
        """c of center="running", in memory of its own: see `center_of` of core/algorithm.py."""

    def forward(self, config: Config, h1: Many[Tensor], s: Measured, memo: dict[Any, Any]) -> Tensor:
        """S(x) is pushed into H1, whose tensors are written to; returns what is kept."""

    def backward(self, config: Config, h2: Many[Tensor], kept: Tensor, g: Tensor, memo: dict[Any, Any]) -> Tensor:
        """g, `(2, *statistic)`, is pushed into H2; returns what flows on in its place."""


class Normalize(Protocol):
    """N(x, s), `s` being a vector each over the channels, where nobody differentiates: an evaluation."""

    def __call__(self, x: Tensor, mean: Tensor, sigma: Tensor, gain: Any, bias: Any) -> Tensor | None:
        """None if it cannot: it looks at all that it reads, and is asked first."""


class Plan(NamedTuple):
    """How a call is served. It holds the state that it writes into, never the layer."""

    call: Signature
    backend: Backend
    prepared: Any = ()


class Sequence(NamedTuple):
    """A recurrent layer in one direction over a packed sequence, as a backend gets it."""

    gates: int  # 1: RNN, 3: the paper's GRU, 4: LSTM
    cell_norm: bool  # on the cell state of an LSTM: the last norm
    relu: bool
    reverse: bool
    training: bool
    tested: bool  # by the statistics of evaluation, where it is no training
    goes_on: bool  # from the state of another sequence
    sizes: tuple[int, ...]  # rows of each timestep
    config: Config  # of all norms


def unknown_settings(config: Statistic, known: Iterable[str]) -> list[str]:
    """Settings that differ from their defaults and that a backend does not know: it declines, until it is told."""
    others = [field for field in fields(config) if field.name not in known]
    return [field.name for field in others if getattr(config, field.name) != field.default]


@cache
def registered() -> dict[str, Backend]:
    """Every backend of this folder by its name, the fastest first: also those that cannot be used here."""
    found: list[Backend] = []
    for module in iter_modules(__path__):
        backend = getattr(import_module(f".{module.name}", __name__), "BACKEND", None)
        if backend is not None:
            found.append(backend)
    return {backend.name: backend for backend in sorted(found, key=lambda each: each.rank)}


def available() -> list[str]:
    """The names of the backends that can be used in this process, the fastest first.

    Example:
        >>> "plain" in available()
        True
    """
    return [name for name, backend in registered().items() if backend.missing() is None]


class Active(NamedTuple):
    """The backends that are asked, in this order. Another one is made by each `use`: plans compare it."""

    backends: tuple[Backend, ...]
    normalize: Normalize | None  # of the first that has one


def _active(names: list[str]) -> Active:
    global among
    known = registered()
    for name in names:
        if name not in known:
            raise ValueError(f"backend {name!r}: there is {', '.join(known)}")
        missing = known[name].missing()
        if missing:
            raise ValueError(f"backend {name!r} cannot be used here: {missing}")
    chosen = list(dict.fromkeys([*names, PLAIN])) if names else available()
    among = ",".join(chosen)
    return _asking(known[name] for name in chosen)


def _asking(backends: Iterable[Backend]) -> Active:
    asked = tuple(backends)
    return Active(asked, next((each.normalize for each in asked if each.normalize is not None), None))


def _from_environment() -> list[str]:
    if os.environ.get("STREAMNORM_PLAIN", "") not in ("", "0"):
        return [PLAIN]
    name = os.environ.get("STREAMNORM_BACKEND", "")
    return [name] if name else []


in_use: Active | None = None  # see `active`
among = ""  # the names of those that are asked: graphs of the compiler depend on it


def active() -> Active:
    """What calls are served by now: all backends, or what `use` or the environment says."""
    global in_use
    if in_use is None:
        in_use = _active(_from_environment())
    return in_use


@contextmanager
def use(name: str) -> Iterator[None]:
    """A context in which calls are served by one backend, and by `plain` where it declines.

    The environment variable STREAMNORM_BACKEND does the same for a process. It holds for all threads.

    Args:
        name: one of `available()`.

    Example:
        >>> from streamnorm import StreamingNorm
        >>> with use("plain"):
        ...     print(explain(StreamingNorm(3), torch.randn(4, 3)))  # doctest: +ELLIPSIS
        plain serves this call. ...
    """
    global in_use, among
    before, names = active(), among
    in_use = _active([name])
    try:
        yield
    finally:
        in_use, among = before, names


def named(names: str) -> Active:
    """The backends of a list such as `among`."""
    known = registered()
    return _asking(known[name] for name in names.split(","))


class Explained(Protocol):
    def _explained(self, x: Tensor, mask: Tensor | None) -> list[str]: ...


def explain(layer: Explained, x: Tensor, mask: Tensor | None = None) -> str:
    """Which backend serves a call of a layer, and why the faster ones do not, a sentence each. Changes nothing.

    Args:
        layer: a norm or a recurrent layer, in the mode that is asked about.
        x: an input of the call; for a recurrent layer a padded sequence.
        mask: its mask, if there is one.

    Example:
        >>> from streamnorm import StreamingNorm
        >>> print(explain(StreamingNorm(3, p=3), torch.randn(4, 3)))  # doctest: +ELLIPSIS
        plain serves this call. ...
    """
    if not hasattr(layer, "_explained"):
        raise TypeError(f"explain: {type(layer).__name__} is no layer of streamnorm; pass a norm or a recurrent layer")
    return " ".join(layer._explained(x, mask))


@lru_cache(maxsize=1024)
def _serving(call: Signature, among: Active) -> tuple[Backend, ...]:
    return tuple(backend for backend in among.backends if backend.declines(call) is None)


def choose(
    call: Signature,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    state: State | None = None,
    among: Active | None = None,
) -> Plan:
    """How a call is served: by the first backend that takes it, `plain` at last."""
    for backend in _serving(call, among or active()):
        prepared = backend.prepare(call, x, weight, bias, state)
        if prepared is not None:
            return Plan(call, backend, prepared)
    raise RuntimeError("no backend serves this call: plain torch always does")


@lru_cache(maxsize=1024)
def streams(config: Config, dtype: torch.dtype, device: str, masked: bool, among: str) -> Streams:
    """What serves F and G alone, of the backends that are named, for statistics of this type."""
    parts: list[Streams] = [backend.streams for backend in named(among).backends if backend.streams is not None]
    return next(part for part in parts if part.declines(config, dtype, device, masked) is None)


def reasons(call: Signature, x: Tensor, weight: Tensor | None, bias: Tensor | None, state: State | None) -> list[str]:
    """One sentence for each backend: which serves the call, and why the faster ones do not."""
    said: list[str] = []
    among = active().backends
    for name, backend in registered().items():
        why = backend.missing() or ("switched off by use()" if backend not in among else backend.declines(call))
        if why is None and backend.prepare(call, x, weight, bias, state) is None:
            why = "a tensor of the layer was replaced by one that it cannot hold"
        if why is None:
            return [f"{name} serves this call.", *said]
        said.append(f"{name} does not: {why}.")
    return said


from .plain import BACKEND as LAW  # noqa: E402

__all__ = ["LAW", "active", "available", "choose", "explain", "layout_of", "use"]
