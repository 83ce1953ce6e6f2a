"""Merging the windows of several processes: one message per weight update for the whole model.

Each process keeps its own short-term window. After a weight update the windows are averaged, weighted by their counts,
so that all processes hold what one would hold that had made all the calls; the fold stays lazy and local.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import state as stream
from ..core.algorithm import window_statistics
from ..core.config import Config
from ..core.state import State, Stream

WORLD = "world"
_DIMENSIONS = 32  # at most, of a statistic


class Described(Protocol):
    def _described(self) -> dict[str, str]: ...


_agreed: WeakKeyDictionary[Any, WeakSet[Described]] = WeakKeyDictionary()  # by group: layers that all have alike


class Share(NamedTuple):
    """What a layer brings to a merge."""

    config: Config
    state: State  # earlier updates folded in, so that the window holds what came since
    seen_before: Tensor  # `seen` at the last merge
    asks: bool  # whether others know a spatial size that it may not know
    layer: Described


class SameGroup:
    """A process group inside of a layer that is copied or pickled: a copy has the same, another process has none."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "SameGroup":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SameGroup, (self.group if self.group in (None, WORLD) else None,)


def check_group(group: object) -> None:
    known = group is None or group == WORLD or _is_outside(group)
    if not known and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f'process_group={group!r}: use "world" for all processes, a group of torch.distributed.new_group, or None'
        )


def _is_outside(group: Any) -> bool:
    """Whether this is what `new_group` gives to processes that are not in it."""
    return dist.is_available() and type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER


def members(group: Any) -> Any:
    """The group to merge over; None where there is nothing to merge with, such as outside of torch.distributed."""
    if group is None or _is_outside(group) or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group == WORLD else group
    return group if dist.get_world_size(group) > 1 else None


@torch.no_grad()
def merged(group: Any, shares: Sequence[Share], skipped: Tensor | None) -> list[tuple[State, Tensor]]:
    """The states after a merge over the group, and what the next merge knows as seen before.

    As they were if `skipped`, a number, is not 0.
    """
    _agree(group, shares)
    bound = _bind_alike(group, shares)
    parts = [_numbers(share, dist.get_rank(group) == 0) for share in bound]
    dtype = max((share.state.mean.dtype for share in bound), key=lambda each: torch.finfo(each).bits)
    device = bound[0].state.mean.device
    message = torch.cat([part.to(device, dtype).flatten() for each in parts for part in each])
    dist.all_reduce(message, group=group)
    sizes = [part.numel() for each in parts for part in each]
    sums = iter(torch.split(message, sizes))
    results = [_merged(share, [next(sums) for _ in each]) for share, each in zip(bound, parts, strict=True)]
    if skipped is None:
        return [(state, state.seen.clone()) for state in results]
    return [_unless(skipped, share, result) for share, result in zip(bound, results, strict=True)]


def _numbers(share: Share, leads: bool) -> list[Tensor]:
    """What is summed over the processes; the first one alone gives the past, which is the same in all of them.

    That costs a few numbers, and mends it where a process has loaded another state than the rest.
    """
    state = share.state
    windows = [part for h in _streams(state) for part in (h.count, h.count * h.short)]
    past = [part for h in _streams(state) for part in (h.long, h.empty)] + [state.eval_long]
    new = (state.seen - share.seen_before).clamp(min=0)
    for before in (share.seen_before, state.counted - state.elements):
        rounded = before.to(state.mean.dtype)  # a counter has more digits than the message: what they leave is sent too
        past += [rounded, before - rounded]
    return [*windows, state.samples, state.elements, new, *(part * leads for part in past)]


def _merged(share: Share, sums: Iterable[Tensor]) -> State:
    state, total = share.state, iter(sums)
    windows = [(next(total), next(total)) for _ in _streams(state)]
    samples, elements, new = (_like(next(total), state.seen) for _ in range(3))
    past = [
        replace(h, long=_like(next(total), h.long), empty=next(total).reshape(()).to(h.long.device) > 0)
        for h in _streams(state)
    ]
    stats, grads = (_with_window(h, *window) for h, window in zip(past, windows, strict=True))
    eval_long = _like(next(total), state.eval_long)
    seen, counted = (_like(next(total), state.seen) + _like(next(total), state.seen) for _ in range(2))
    state = replace(state, stats=stats, grads=grads, seen=seen + new, counted=counted + elements, elements=elements)
    state = replace(state, samples=samples, eval_long=eval_long)
    s_hat, tested = window_statistics(share.config, state)
    there = stats.count > 0
    mean, sigma = torch.where(there, s_hat[0], state.mean), torch.where(there, s_hat[1], state.sigma)
    lasting = torch.where(there, tested, torch.stack([state.eval_mean, state.eval_sigma]))
    return replace(state, mean=mean, sigma=sigma, eval_mean=lasting[0], eval_sigma=lasting[1])


def _with_window(h: Stream, count: Tensor, weighted: Tensor) -> Stream:
    short = _like(weighted / count.clamp(min=1), h.short)
    return replace(h, short=torch.where(count.to(h.short.device) > 0, short, h.short), count=_like(count, h.count))


def _streams(state: State) -> list[Stream]:
    return [state.stats, state.grads]


def _like(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like).reshape(like.shape)


def _unless(skipped: Tensor, share: Share, result: State) -> tuple[State, Tensor]:
    taken = (skipped == 0).reshape(()).to(result.seen.device)
    before, after = stream.to_dict(share.state), stream.to_dict(result)
    state = stream.from_dict({name: torch.where(taken, after[name], before[name]) for name in before})
    return state, torch.where(taken, result.seen, share.seen_before)


def _agree(group: Any, shares: Sequence[Share]) -> None:
    """Refuse, in all processes alike, to merge layers that are not the same in all of them.

    One more message of two numbers, and only when a layer meets a group for the first time. The next one would have
    another length in each process, which backends answer by an abort or by waiting.
    """
    known = _agreed.setdefault(group, WeakSet())
    if all(share.layer in known for share in shares):
        return
    own = [share.layer._described() for share in shares]
    digest = int.from_bytes(sha256(repr(own).encode()).digest()[:7], "big")
    # The largest and, negated, the smallest, so that all notice if they differ.
    digests = torch.tensor([digest, -digest], device=shares[0].state.seen.device)
    dist.all_reduce(digests, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = digests.tolist()
    if largest != -smallest:
        everybodys = _everybodys(group, own, digests.device)
        raise RuntimeError(
            f"the processes would merge different layers: {_difference(group, everybodys)}. Make the same layers with "
            "the same settings in all of them, in the same order, and step the same optimizers"
        )
    known.update(share.layer for share in shares)


def _everybodys(group: Any, own: list[dict[str, str]], device: torch.device) -> list[list[dict[str, str]]]:
    """The layers of all processes. As bytes on their own device: torch sends objects from the one that is current."""
    words = json.dumps(own).encode()
    size = torch.tensor([len(words)], device=device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
    padded = torch.tensor(list(words.ljust(int(size))), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(bytes(part.tolist())) for part in parts]


def _difference(group: Any, everybodys: list[list[dict[str, str]]]) -> str:
    """The first thing that differs, in words."""

    def told(values: Iterable[str]) -> str:
        ranks: dict[str, list[str]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(value, []).append(str(dist.get_global_rank(group, rank)))
        return ", ".join(f"{value} (rank{'s' * (len(r) > 1)} {', '.join(r)})" for value, r in ranks.items())

    sizes = [len(layers) for layers in everybodys]
    if len(set(sizes)) > 1:
        return told(f"{size} layer{'s' * (size > 1)}" for size in sizes)
    found = (at for at, layers in enumerate(zip(*everybodys, strict=True)) if any(each != layers[0] for each in layers))
    at = next(found)
    layers = [each[at] for each in everybodys]
    which = f"layer {at + 1} of {sizes[0]}, in the order of making"
    if len({layer["kind"] for layer in layers}) > 1:
        return f"{which}: {told(layer['kind'] for layer in layers)}"
    parts = [name for name in layers[0] if len({layer[name] for layer in layers}) > 1]
    return f"{which}, {layers[0]['kind']}: " + "; ".join(told(layer[name] for layer in layers) for name in parts)


def _bind_alike(group: Any, shares: Sequence[Share]) -> list[Share]:
    """The shares, those bound to a spatial size that another process knows and this one, without a batch, does not.

    One more message, and only as long as a layer whose statistics have a location asks.
    """
    asking = [i for i, share in enumerate(shares) if share.asks]
    if not asking:
        return list(shares)
    unknown = torch.iinfo(torch.int64).min
    # The largest and, negated, the smallest, so that all notice if they differ.
    shapes = torch.full((2, len(asking), _DIMENSIONS), unknown, device=shares[0].state.seen.device)
    for at, i in enumerate(asking):
        own = shares[i].state.mean
        if own.numel():
            numbers = torch.zeros(_DIMENSIONS, dtype=torch.int64)
            numbers[: own.ndim + 1] = torch.tensor([own.ndim, *own.shape])
            shapes[0, at], shapes[1, at] = numbers, -numbers
    dist.all_reduce(shapes, op=dist.ReduceOp.MAX, group=group)
    bound = list(shares)
    for largest, smallest, i in zip(shapes[0].tolist(), (-shapes[1]).tolist(), asking, strict=True):
        dims, *sizes = largest
        if dims == unknown:
            continue
        if largest != smallest:
            raise RuntimeError(
                f"a layer has statistics of shape {tuple(shares[i].state.mean.shape)} in this process and of another "
                "one elsewhere: a reference with a location needs the same spatial size in all processes"
            )
        bound[i] = shares[i]._replace(state=stream.bind(shares[i].state, tuple(sizes[:dims])))
    return bound
