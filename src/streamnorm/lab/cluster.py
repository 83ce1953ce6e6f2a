"""Runs on the workers of a Dask scheduler: the carrier of `--cluster`.

Each run is one task. Dask gives the task of a lost worker to another one, where the run goes on from its checkpoint if
the folder of runs is shared, and begins again if not. Results come back through the scheduler, and are written here
where the worker could not.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any
from uuid import uuid4

from .errors import JobError, LabError
from .jobs import Loader, Progress, Room, terminable
from .remote import TOPIC, Order, agreed, distributed, refusal, train_there
from .results import RESULT
from .runs import Run
from .store import complaining, write_json
from .train import CHECKPOINT, Row

CONNECT_SECONDS = 5.0
STOP_SECONDS = 30.0  # for the workers to save their runs
DASK_WORKER = "dask worker {} --nthreads 1"


class Cluster:
    """Connected to the scheduler at `address`; `say` hears of what the user should know."""

    def __init__(
        self, address: str, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    ) -> None:
        self.address, self.say = address, say
        self.client = _connect(address)
        self.alone = False  # whether the lack of workers has been said
        try:
            self._check_workers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.client.close(timeout=CONNECT_SECONDS)

    def room(self, runs: int) -> Room:
        workers = max(min(len(self._workers()), runs), 1)
        return Room(workers, 1, f"on {workers} worker{'s' * (workers > 1)} as fast as this machine")

    def carry(self, runs: Mapping[int, Run], load: Loader, root: Path, progress: Progress) -> dict[int, Row]:
        with terminable(), _marked(root) as mark:
            return _Carried(self, runs, load, root, mark).results(progress)

    def _workers(self) -> set[str]:
        """Their addresses; that there are none is said, and said again only if there have been some since."""
        workers = set(self.client.nthreads())
        if not workers and not self.alone:
            start = DASK_WORKER.format(self.address)
            self.say(f"no workers at {self.address}: waiting for one; start it with: {start}")
        self.alone = not workers
        return workers

    def _check_workers(self) -> None:
        """Those that are there: what they lack is said before the work. Others are checked when they take a run."""
        for worker, answer in self.client.run(refusal, agreed(), on_error="return").items():
            if isinstance(answer, ImportError | AttributeError):
                version = agreed()["streamnorm"]
                raise JobError(f"worker {worker} cannot use streamnorm ({answer}): install streamnorm {version} there")
            if answer and isinstance(answer, str):
                raise JobError(answer)


class _Carried:
    """Runs on their way: tasks of Dask, and the news of them."""

    def __init__(self, cluster: Cluster, runs: Mapping[int, Run], load: Loader, root: Path, mark: str) -> None:
        self.cluster, self.client = cluster, cluster.client
        self.news: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.where: dict[int, str] = {}  # the workers of runs that are being trained
        token = uuid4().hex
        self.client.subscribe_topic(TOPIC, lambda event: self._take(token, event[1]))
        folder = None if load.folder is None else load.folder.resolve()
        self.folders: dict[int, Path] = {}
        self.tasks: dict[int, Any] = {}
        for i, run in runs.items():
            fingerprint = load(run).fingerprint
            self.folders[i] = root / run.address(fingerprint)
            source = str(Path(run.data).resolve()) if run.is_text and Path(run.data).exists() else run.data
            order = Order(run, fingerprint, source, folder, root.resolve(), mark, agreed(), token, i)
            name = f"streamnorm-{self.folders[i].name}-{token}"  # a stopped run may still be ending under its name
            self.tasks[i] = self.client.submit(train_there, order, key=name)
        for i, task in self.tasks.items():
            task.add_done_callback(lambda _, i=i: self.news.put((i, "ended")))

    def _take(self, token: str, message: Any) -> None:
        """In another thread: a topic has the news of all who listen to it."""
        if message[0] == token:
            self.news.put(tuple(message[1:]))

    def results(self, progress: Progress) -> dict[int, Row]:
        found: dict[int, Row] = {}
        try:
            while len(found) < len(self.tasks):
                i, kind, *rest = self._next()
                if kind == "ended":
                    found[i] = self._result(i)
                    progress.end(i)
                elif kind == "progress" and i not in found:
                    progress.advance(i, *rest)
        finally:
            self._stop()
        return found

    def _next(self) -> tuple[Any, ...]:
        """The next news, however long it takes."""
        while True:
            with contextlib.suppress(Empty):
                return self._hear(1.0)
            self._check_scheduler()
            self.cluster._workers()

    def _hear(self, seconds: float) -> tuple[Any, ...]:
        news = self.news.get(timeout=seconds)
        i, kind, *rest = news
        if kind == "begun":
            self.where[i] = rest[0]
        elif kind == "left":
            self.where.pop(i, None)
        return news

    def _check_scheduler(self) -> None:
        if self.client.status != "running":
            raise JobError(
                f"the scheduler at {self.cluster.address} is gone: start it and its workers, then the same command "
                "goes on"
            )

    def _result(self, i: int) -> Row:
        task, address = self.tasks[i], self.folders[i].name
        if task.status == "cancelled" or task.status == "lost":
            self._check_scheduler()
            raise JobError(f"run {address} was cancelled by somebody else: the same command goes on")
        if task.status == "error":
            error = task.exception()
            if isinstance(error, distributed().KilledWorker):
                raise JobError(
                    f"run {address} lost {error.allowed_failures + 1} workers: see their logs, then run again"
                )
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            raise JobError(f"run {address} could not be given to a worker ({words}): see the logs of workers")
        row, why = task.result()
        if row is None:
            raise JobError(why)
        self._keep(self.folders[i], row)
        return dict(row)

    @staticmethod
    def _keep(folder: Path, row: Row) -> None:
        """The result, if the folder is not shared."""
        if not (folder / RESULT).exists():
            write_json(folder / RESULT, row)
            (folder / CHECKPOINT).unlink(missing_ok=True)

    def _stop(self) -> None:
        """Ask the workers to save their runs, and wait until they have."""
        limit = time.monotonic() + STOP_SECONDS
        if self.client.status != "running":
            return
        self.client.cancel(list(self.tasks.values()))
        alive = set(self.client.nthreads())
        while any(worker in alive for worker in self.where.values()) and time.monotonic() < limit:
            with contextlib.suppress(Empty):
                self._hear(0.1)


def _connect(address: str) -> Any:
    dask = distributed()
    try:
        return dask.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise LabError(
            f"no scheduler at {address} ({words}): start one with dask scheduler, and pass the address that it prints"
        ) from error


@contextlib.contextmanager
def _marked(root: Path) -> Iterator[str]:
    """With a file in the folder of runs, by which workers know whether it is theirs too."""
    mark = root / f".cluster-{uuid4().hex}"
    with complaining(mark):
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        yield mark.name
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
