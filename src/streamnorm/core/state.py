"""What a streaming layer remembers: the one list of its tensors, with their order, kinds and first values.

H1 (statistics) belongs to the forward pass, H2 (their gradients) to the backward pass. The rules of `algorithm` are
pure functions from state to state; `write` puts a result into the tensors that a layer keeps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Kind(Enum):
    """What a tensor of the state is: its shape and type follow."""

    PAIR = "pair"  # (2, *statistic): row 0 mean, row 1 sigma
    VECTOR = "vector"  # (*statistic)
    COUNT = "count"  # int64 scalar
    FLAG = "flag"  # bool scalar
    COUNTER = "counter"  # of elements, see `counter_dtype`
    NUMBER = "number"  # scalar of the type of the statistics


def _of(kind: Kind, first: float = 0) -> dict[str, Any]:
    """About a field: what it is, and its value before training."""
    return {"kind": kind, "first": first}


@dataclass(frozen=True)
class Stream:
    """`short`: exact average since the last weight update. `long`: exponential average of those."""

    long: Tensor = field(metadata=_of(Kind.PAIR))
    short: Tensor = field(metadata=_of(Kind.PAIR))
    count: Tensor = field(metadata=_of(Kind.COUNT))  # pushes since the last weight update
    empty: Tensor = field(metadata=_of(Kind.FLAG, True))  # no fold yet, so `long` means nothing
    pending: Tensor = field(metadata=_of(Kind.FLAG))  # a weight update is waiting to be folded in


@dataclass(frozen=True)
class State:
    """Everything a streaming layer remembers. Of H1 are all but `grads` and `loss_scale`, which are of H2.

    Attributes:
        stats: H1, the streams of mean and sigma: `long`, `short`, `count`, `empty`, `pending`.
        grads: H2, the streams of their gradients, with the same parts.
        mean, sigma: the latest s_hat.
        seen: elements per statistic so far, for the warm start.
        elements: elements per statistic since the last weight update; the timesteps of a sequence count once.
        elements_before: those of the window before; 0 if there was none.
        counted: those of all windows so far.
        samples: samples since the last weight update.
        eval_long: as `long` of H1, with a longer memory, for evaluation.
        eval_mean, eval_sigma: what evaluation uses.
        loss_scale: of the latest push into H2; 0 if there never was a scaler.

    Example:
        >>> from streamnorm.functional import new_state
        >>> state = new_state(3)
        >>> state.stats.long.shape, int(state.stats.count)
        (torch.Size([2, 3]), 0)
    """

    stats: Stream
    grads: Stream
    mean: Tensor = field(metadata=_of(Kind.VECTOR))
    sigma: Tensor = field(metadata=_of(Kind.VECTOR, 1))
    seen: Tensor = field(metadata=_of(Kind.COUNTER))
    elements: Tensor = field(metadata=_of(Kind.COUNTER))
    elements_before: Tensor = field(metadata=_of(Kind.COUNTER))
    counted: Tensor = field(metadata=_of(Kind.COUNTER))
    samples: Tensor = field(metadata=_of(Kind.COUNTER))
    eval_long: Tensor = field(metadata=_of(Kind.PAIR))
    eval_mean: Tensor = field(metadata=_of(Kind.VECTOR))
    eval_sigma: Tensor = field(metadata=_of(Kind.VECTOR, 1))
    loss_scale: Tensor = field(metadata=_of(Kind.NUMBER))


STREAMS = ("stats", "grads")
PARTS = tuple(each.name for each in fields(Stream))
_NUMBERS = tuple(each.name for each in fields(State) if each.name not in STREAMS)
_METADATA = {f"{name}_{part.name}": part.metadata for name in STREAMS for part in fields(Stream)}
_METADATA |= {each.name: each.metadata for each in fields(State) if each.name not in STREAMS}
# Every tensor by its name in a state_dict, in the order in which backends and operators take them.
FIELDS: dict[str, Kind] = {name: metadata["kind"] for name, metadata in _METADATA.items()}
H2 = tuple(name for name in FIELDS if name.startswith("grads_") or name == "loss_scale")
H1 = tuple(name for name in FIELDS if name not in H2)


def counter_dtype(device: torch.device) -> torch.dtype:
    """A type that goes on counting: float32 stands still at 2^24. Averages of elements need not be whole."""
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have


def dtype_of(name: str, statistics: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a tensor of a state, by its name."""
    kind = FIELDS[name]
    if kind is Kind.COUNTER:
        return counter_dtype(device)
    return {Kind.COUNT: torch.int64, Kind.FLAG: torch.bool}.get(kind, statistics)


def shape_of(name: str, statistic: tuple[int, ...]) -> tuple[int, ...]:
    """The same for its shape; `statistic`: that of one statistic."""
    return {Kind.PAIR: (2, *statistic), Kind.VECTOR: tuple(statistic)}.get(FIELDS[name], ())


def _new(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    dtype = dtype_of(name, like.dtype, like.device)
    return torch.full(shape_of(name, shape), _METADATA[name]["first"], dtype=dtype, device=like.device)


def new_state(shape: tuple[int, ...], like: Tensor) -> State:
    return from_dict({name: _new(name, shape, like) for name in FIELDS})


def new_stream(shape: tuple[int, ...], like: Tensor) -> Stream:
    return Stream(**{part: _new(f"grads_{part}", shape, like) for part in PARTS})


def bind(state: State, shape: tuple[int, ...]) -> State:
    """Give a state whose statistics are empty, not bound to a spatial size yet, their shape."""
    if state.mean.numel():
        return state
    fresh = new_state(shape, state.mean)
    return replace(
        fresh,
        stats=replace(fresh.stats, pending=state.stats.pending),
        grads=replace(fresh.grads, pending=state.grads.pending),
        loss_scale=state.loss_scale,
    )


def to_dict(state: State) -> dict[str, Tensor]:
    """The tensors of a state under flat names: `mean`, `stats_long`, ..."""
    return {**_flat(state), **{name: getattr(state, name) for name in _NUMBERS}}  # a form that older compilers trace


def _flat(state: State) -> dict[str, Tensor]:
    return {f"{name}_{part}": getattr(getattr(state, name), part) for name in STREAMS for part in PARTS}


def from_dict(tensors: dict[str, Tensor]) -> State:
    """The inverse of `to_dict`."""
    stats, grads = (Stream(**{part: tensors[f"{name}_{part}"] for part in PARTS}) for name in STREAMS)
    return State(stats, grads, **{name: tensors[name] for name in _NUMBERS})


def of_h1(state: State) -> list[Tensor]:
    """The tensors that a forward pass reads and writes, in their order."""
    tensors = to_dict(state)
    return [tensors[name] for name in H1]


def from_h1(tensors: Iterable[Tensor]) -> State:
    """The inverse, for a forward pass alone: what is of H2 has no elements."""
    nothing = torch.empty(0)
    return from_dict({**dict.fromkeys(H2, nothing), **dict(zip(H1, tensors, strict=True))})


def write(state: State, new: State, names: Iterable[str] = tuple(FIELDS)) -> None:
    """Copy the values of `new` into the tensors of `state`: all, or some by name."""
    kept, values = to_dict(state), to_dict(new)
    for name in names:
        if values[name] is not kept[name]:
            kept[name].copy_(values[name])


def write_stream(stream: Stream, new: Stream) -> None:
    """The same for one of its streams."""
    for part in PARTS:
        getattr(stream, part).copy_(getattr(new, part))


def copied(state: State) -> State:
    return from_dict({name: tensor.clone().contiguous() for name, tensor in to_dict(state).items()})


def copied_stream(stream: Stream) -> Stream:
    return Stream(**{part: getattr(stream, part).clone() for part in PARTS})


def completed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a version before kept, and what has come since: evaluation used the latest s_hat."""
    known = dict(tensors)
    as_was = {"eval_long": "stats_long", "eval_mean": "mean", "eval_sigma": "sigma"}
    known |= {name: known[old].clone() for name, old in as_was.items() if name not in known and old in known}
    if "seen" in known:  # nor did all of them count what a window holds
        counts = ("elements", "elements_before", "samples")
        known |= {name: torch.zeros_like(known["seen"]) for name in counts if name not in known}
        known.setdefault("counted", known["seen"].clone())
    return known


def recounted(state: State) -> State:
    """A state as version 3 or this one keeps it, whose counters may be of an older type."""
    tensors = completed({**vars(state), **_flat(state), "elements": state.elements})
    counters = [name for name, kind in FIELDS.items() if kind is Kind.COUNTER]
    return from_dict(tensors | {name: tensors[name].to(counter_dtype(tensors[name].device)) for name in counters})
