"""Times of calls that are to be compared: run interleaved in one process, in many short rounds.

A machine's other work then slows all of them alike; a ratio is taken within a round.
"""

import time
from collections.abc import Callable
from statistics import median

from torch import nn

from .. import StreamingNorm

Call = Callable[[], object]
Wait = Callable[[], None]  # for a device that works behind the caller's back
FEWEST_ROUNDS = 3


def nothing() -> None:
    """To wait for where calls end when their work does."""


def seconds_of(call: Call, calls: int, wait: Wait = nothing) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def repeat(call: Call, calls: int, seconds: float, wait: Wait = nothing) -> float:
    """At least one call, and no more than fit into the time; the seconds of the fastest."""
    end, times = time.perf_counter() + seconds, list[float]()
    while not times or (len(times) < calls and time.perf_counter() < end):
        times.append(seconds_of(call, 1, wait))
    return min(times)


def settled(call: Call, module: nn.Module | None, more: int, seconds: float, wait: Wait = nothing) -> float:
    """Past the first weight update, and past the warm-up of the streaming norms if the time allows."""
    repeat(call, 10, seconds, wait)
    for layer in () if module is None else module.modules():
        if isinstance(layer, StreamingNorm):
            layer.weights_updated()
    return repeat(call, more, seconds, wait)


def race(
    calls: dict[str, tuple[Call, float]], rounds: int, seconds: float, wait: Wait = nothing
) -> dict[str, list[float]]:
    """Seconds per call, one entry per round, for each of `calls`, given with about how long one takes.

    `seconds`: of a round of all together; slow calls run once each, and if they take twice the time there are fewer
    rounds, at least `FEWEST_ROUNDS`.
    """
    counts = {name: max(1, int(seconds / len(calls) / one)) for name, (_, one) in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + 2 * rounds * seconds
    for i in range(rounds):
        if i >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name in list(calls) if i % 2 else reversed(calls):  # nobody always follows the same neighbour
            times[name].append(seconds_of(calls[name][0], counts[name], wait))
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over the rounds."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))
