"""One run on a worker of a cluster: the task that `cluster` hands to Dask.

Whoever waits for it is told on the topic, as [token, number of the run, kind of news, ...]:
    "begun", address        a worker has taken the run
    "progress", ...         as `train` reports it
    "left"                  the worker has done with it, however it ended
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .data import Images, Text
from .errors import BusyError, DataError, LabError, MissingExtra
from .jobs import Loader
from .runs import Run
from .train import Row, train, versions

TOPIC = "streamnorm"
MUST_AGREE = ("streamnorm", "loop", "torch")  # or a run would not be the same run
LOCK_SECONDS = 120.0  # in which a file system on the network takes back the lock of a machine that is gone
CLOSING = ("closing", "closing_gracefully", "closed", "stopping", "stopped")


@dataclass(frozen=True)
class Order:
    """A run, and what a worker needs to know of the place where it was asked for; all paths are absolute."""

    run: Run
    fingerprint: str  # of the data
    source: str  # `run.data`, or the path of that text
    folder: Path | None  # of the data
    root: Path  # of all runs
    mark: str  # a file in `root`: a worker that sees it shares the folder
    versions: dict[str, str]
    token: str
    number: int


def distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError as error:
        raise MissingExtra('--cluster needs dask.distributed: pip install "streamnorm[cluster]"') from error


def agreed() -> dict[str, str]:
    """The versions that have to be the same everywhere."""
    return {name: version for name, version in versions().items() if name in MUST_AGREE}


def refusal(wanted: dict[str, str], dask_worker: Any) -> str:
    """Why this worker cannot train; empty if it can."""
    here = agreed()
    for name in MUST_AGREE:
        if here[name] != wanted[name]:
            return f"worker {dask_worker.address} has {name} {here[name]}, not {wanted[name]}: install the same there"
    if dask_worker.state.nthreads != 1:
        many = dask_worker.state.nthreads
        return f"worker {dask_worker.address} has {many} threads, must have 1: start it with --nthreads 1"
    return ""


def train_there(order: Order) -> tuple[Row | None, str]:
    """The result of a run, or why there is none."""
    worker = distributed().get_worker()
    key = worker.get_current_task()

    def tell(*news: Any) -> None:
        worker.log_event(TOPIC, [order.token, order.number, *news])

    def stopped() -> bool:
        """Whether nobody waits for the run any more, or the worker is about to end."""
        task = worker.state.tasks.get(key)
        return task is None or task.state != "executing" or worker.status.name in CLOSING

    tell("begun", worker.address)
    try:
        if why := refusal(order.versions, worker):
            return None, why
        torch.set_num_threads(1)
        with _root(order, worker) as root:
            return _train(order, root, lambda *news: tell("progress", *news), stopped), ""
    except LabError as error:
        return None, f"{error} (on worker {worker.address})"
    except Exception as error:  # not left to Dask: nothing is heard of an exception that cannot be pickled
        traceback.print_exc()
        name, words = order.run.address(order.fingerprint), f"{type(error).__name__}: {error}".splitlines()[0]
        return None, f"run {name} ended with {words}; the log of the worker has more (on worker {worker.address})"
    except KeyboardInterrupt:  # it has been saved; if it is still wanted, it goes on elsewhere
        raise distributed().Reschedule from None
    finally:
        tell("left")


@contextmanager
def _root(order: Order, worker: Any) -> Iterator[Path]:
    """The folder of all runs, if it is here; else one for this run alone."""
    if is_shared(order):
        yield order.root
        return
    with TemporaryDirectory(dir=worker.local_directory) as folder:
        yield Path(folder)


def is_shared(order: Order) -> bool:
    with suppress(OSError):
        return (order.root / order.mark).exists()
    return False


def _train(order: Order, root: Path, report: Callable[..., None], stopped: Callable[[], bool]) -> Row:
    data, limit = _data(order), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return train(order.run, data, root, report, stopped=stopped)
        except BusyError:  # by a worker that was taken for lost, and will notice
            if time.monotonic() > limit:
                raise
            if stopped():
                raise KeyboardInterrupt from None
            time.sleep(0.5)


@cache
def _loader(folder: Path | None) -> Loader:
    return Loader(folder)


def _data(order: Order) -> Images | Text:
    """Loaded once in a worker, and again if it is not what is asked for."""
    there = replace(order.run, data=order.source)
    for _ in range(2):
        data = _loader(order.folder)(there)
        if data.fingerprint == order.fingerprint:
            return data
        _loader.cache_clear()
    raise DataError(f"{order.source} is other data than where the run was asked for: put the same there")
