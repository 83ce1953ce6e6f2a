"""The progress bar of many runs: share of the estimated time, updates per second, loss, time left."""

import os
import sys
import time
from importlib import import_module
from typing import Any


class Bar:
    """`labels` and estimated `costs` in seconds of the runs. Silent where nobody looks: without a terminal."""

    def __init__(self, labels: list[str], costs: list[float]) -> None:
        self.labels, self.costs = labels, [max(cost, 1e-3) for cost in costs]
        self.shares = [0.0] * len(costs)
        self.ended = 0
        self.at: dict[int, tuple[int, float]] = {}  # run -> updates when last heard of, and when
        self.bar = _tqdm(sum(self.costs))

    def advance(self, i: int, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        before, then = self.at.get(i, (done, now))
        rate = max(done - before, 0) / (now - then) if now > then else 0.0  # less: begun again elsewhere
        self.at[i] = done, now
        self._share(i, done / total)
        if self.bar is not None:
            self.bar.set_postfix_str(f"{self.labels[i]}: {rate:.0f} updates/s, loss {loss:.3f}", refresh=False)

    def end(self, i: int) -> None:
        self.ended += 1
        self._share(i, 1.0)
        if self.bar is not None:
            self.bar.set_description_str(f"{self.ended}/{len(self.costs)} runs")

    def _share(self, i: int, share: float) -> None:
        if self.bar is not None:
            self.bar.update((share - self.shares[i]) * self.costs[i])
        self.shares[i] = share

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _tqdm(total: float) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        print('no progress bar: pip install "streamnorm[lab]"', file=sys.stderr)
        return None
    plain = {"colour": None} if os.environ.get("NO_COLOR") else {}  # tqdm has a variable of its own for colours
    layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed} < {remaining} {postfix}"
    return tqdm(total=total, bar_format=layout, desc="0 runs", dynamic_ncols=True, **plain)
