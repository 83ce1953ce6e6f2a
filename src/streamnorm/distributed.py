"""Merging the windows of several processes: one message per weight update for the whole model.

Each process keeps its own short-term window. After a weight update the windows are averaged, weighted by their counts,
so that all processes hold what one would hold that had made all the calls; the fold stays lazy and local.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import stream
from .rules import Rules, window_statistics
from .stream import State, Stream

WORLD = "world"
_DIMENSIONS = 8  # at most, of a statistic


class Share(NamedTuple):
    """What a layer brings to a merge."""

    rules: Rules
    state: State  # earlier updates folded in, so that the window holds what came since
    seen_before: Tensor  # `seen` at the last merge
    first: bool  # it was never merged: all then take over the long-term averages of the first process


class SameGroup:
    """A process group inside of a layer that is copied or pickled: a copy has the same, another process has none."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "SameGroup":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SameGroup, (self.group if self.group in (None, WORLD) else None,)


def check_group(group: object) -> None:
    known = group is None or group == WORLD
    if not known and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f'process_group={group!r}: use "world" for all processes, a group of torch.distributed.new_group, or None'
        )


def members(group: Any) -> Any:
    """The group to merge over; None where there is nothing to merge with, such as outside of torch.distributed."""
    if group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group == WORLD else group
    return group if dist.get_world_size(group) > 1 else None


@torch.no_grad()
def merged(group: Any, shares: Sequence[Share], skipped: Tensor | None) -> list[tuple[State, Tensor]]:
    """The states after a merge over the group, and what the next merge knows as seen before.

    As they were if `skipped`, a number, is not 0.
    """
    bound = _bind_alike(group, shares)
    parts = [_numbers(share, dist.get_rank(group) == 0) for share in bound]
    dtype = max((share.state.seen.dtype for share in bound), key=lambda each: torch.finfo(each).bits)
    device = bound[0].state.seen.device
    message = torch.cat([part.to(device, dtype).flatten() for each in parts for part in each])
    dist.all_reduce(message, group=group)
    sizes = [part.numel() for each in parts for part in each]
    sums = iter(torch.split(message, sizes))
    results = [_merged(share, [next(sums) for _ in each]) for share, each in zip(bound, parts, strict=True)]
    if skipped is None:
        return [(state, state.seen.clone()) for state in results]
    return [_unless(skipped, share, result) for share, result in zip(bound, results, strict=True)]


def _numbers(share: Share, leads: bool) -> list[Tensor]:
    """What is summed over the processes."""
    state = share.state
    windows = [part for h in _streams(state) for part in (h.count, h.count * h.short)]
    numbers = [*windows, state.seen - share.seen_before]
    if share.first:
        start = [part for h in _streams(state) for part in (h.long, h.empty)]
        numbers += [part * leads for part in (*start, share.seen_before)]
    return numbers


def _merged(share: Share, sums: Iterable[Tensor]) -> State:
    state, total = share.state, iter(sums)
    windows = [(next(total), next(total)) for _ in _streams(state)]
    seen, before = next(total), share.seen_before
    streams = _streams(state)
    if share.first:
        ahead = [replace(h, long=_like(next(total), h.long), empty=next(total).reshape(()) > 0) for h in streams]
        streams, before = ahead, _like(next(total), before)
    stats, grads = (_with_window(h, *window) for h, window in zip(streams, windows, strict=True))
    state = replace(state, stats=stats, grads=grads, seen=before + _like(seen, before))
    s_hat = window_statistics(share.rules, state)
    there = stats.count > 0
    mean, sigma = torch.where(there, s_hat[0], state.mean), torch.where(there, s_hat[1], state.sigma)
    return replace(state, mean=mean, sigma=sigma)


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


def _bind_alike(group: Any, shares: Sequence[Share]) -> list[Share]:
    """The shares, those bound to a spatial size that another process knows and this one, without a batch, does not.

    One more message, and only while a layer whose statistics have a location has not been merged.
    """
    asking = [i for i, share in enumerate(shares) if share.first and share.rules.statistic.ref.located]
    if not asking:
        return list(shares)
    shapes = torch.zeros(len(asking), _DIMENSIONS, dtype=torch.int64, device=shares[0].state.seen.device)
    for row, i in zip(shapes, asking, strict=True):
        own = shares[i].state.mean
        numbers = [len(own.shape) + 1, *own.shape] if own.numel() else [0]
        row[: len(numbers)] = torch.tensor(numbers)
    dist.all_reduce(shapes, op=dist.ReduceOp.MAX, group=group)
    bound = list(shares)
    for (length, *sizes), i in zip(shapes.tolist(), asking, strict=True):
        state, shape = shares[i].state, tuple(sizes[: length - 1]) if length else (0,)
        if state.mean.numel() and tuple(state.mean.shape) != shape:
            raise RuntimeError(
                f"this process has statistics of shape {tuple(state.mean.shape)}, another one {shape}: a reference "
                "with a location needs the same spatial size in all processes"
            )
        bound[i] = shares[i]._replace(state=stream.bind(state, shape))
    return bound
