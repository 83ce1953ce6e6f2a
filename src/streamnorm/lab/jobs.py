"""Many runs: found again where they were trained before, the rest handed to a carrier: here, or several processes.

Each worker has a pipe of its own and nothing shared, so the death of one, however sudden, leaves the others working
and its run to be gone on with. The other carrier is in `cluster`.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from .data import Images, Text, load_images, load_text
from .errors import JobError, LabError
from .runs import ONCE, Run
from .tasks import EVALUATION_BATCH
from .train import Row, Training, is_done, train

MEASURED_SECONDS = 0.4


class Progress(Protocol):
    def advance(self, i: int, done: int, total: int, loss: float) -> None:
        """Run i has made `done` of its `total` updates."""

    def end(self, i: int) -> None: ...


@dataclass(frozen=True)
class Room:
    """What a carrier has for runs."""

    at_once: int  # runs
    threads: int  # of each run
    words: str


class Carrier(Protocol):
    """Who trains the runs that are missing."""

    def room(self, runs: int) -> Room:
        """For so many runs."""

    def carry(self, runs: Mapping[int, Run], load: "Loader", root: Path, progress: Progress) -> dict[int, Row]:
        """The results of `runs`, by their numbers. Those that are left out are trained here."""


class Loader:
    """The data of runs, from `folder` if it is given; loaded once in each process that needs it.

    `offline`: images that would have to be downloaded are refused.
    """

    def __init__(self, folder: Path | None = None, offline: bool = False) -> None:
        self.folder, self.offline = folder, offline
        self.loaded: dict[str, Images | Text] = {}

    def __call__(self, run: Run) -> Images | Text:
        if run.data not in self.loaded:
            self.loaded[run.data] = (
                load_text(run.data, self.folder)
                if run.is_text
                else load_images(run.data, self.folder, offline=self.offline)
            )
        return self.loaded[run.data]


def run_all(runs: Sequence[Run], load: Loader, root: Path, carrier: Carrier, progress: Progress) -> list[Row]:
    """The results of `runs`, in order. `root`: the folder of all runs."""
    missing = {i: run for i, run in enumerate(runs) if not is_done(run, load(run), root)}
    trained = carrier.carry(missing, load, root, progress) if missing else {}
    return [trained[i] if i in trained else _run_here(i, run, load, root, progress) for i, run in enumerate(runs)]


def _run_here(i: int, run: Run, load: Loader, root: Path, progress: Progress) -> Row:
    result = train(run, load(run), root, lambda done, total, loss: progress.advance(i, done, total, loss))
    progress.end(i)
    return result


class Processes:
    """So many of them on this machine; a single one is this one."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def room(self, runs: int) -> Room:
        jobs = max(min(self.jobs, runs), 1)
        threads = max(torch.get_num_threads() // jobs, 1)
        return Room(jobs, threads, f"in {jobs} process{'es' * (jobs > 1)}")

    def carry(self, runs: Mapping[int, Run], load: Loader, root: Path, progress: Progress) -> dict[int, Row]:
        room = self.room(len(runs))
        return _run_in_processes(runs, load, root, room, progress) if room.at_once > 1 else {}


HERE = Processes(1)


def _run_in_processes(
    runs: Mapping[int, Run], load: Loader, root: Path, room: Room, progress: Progress
) -> dict[int, Row]:
    results: dict[int, Row] = {}
    waiting = list(runs)
    workers: list[Worker] = []
    with terminable():
        try:
            for _ in range(room.at_once):
                workers.append(Worker(load.folder, root, room.threads))
            while len(results) < len(runs):
                for worker in workers:
                    if worker.run is None and waiting:
                        worker.give(waiting.pop(0), runs)
                busy = {worker.pipe: worker for worker in workers if worker.run is not None}
                for pipe in wait(list(busy), timeout=1):
                    worker = busy[pipe]  # type: ignore[index]
                    kind, *rest = worker.hear()
                    i = worker.run
                    assert i is not None
                    if kind == "progress":
                        progress.advance(i, *rest)
                    elif kind == "result":
                        results[i], worker.run = rest[0], None
                        progress.end(i)
                    else:
                        raise JobError(rest[0])
        finally:
            for worker in workers:
                worker.stop()
    return results


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM is heeded like Ctrl-C, so that whoever trains is asked to save."""
    old = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


class Worker:
    """A process that trains the runs it is given, one after the other."""

    def __init__(self, folder: Path | None, root: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, folder, root, threads), daemon=True)
        # A Ctrl-C reaches all processes of a terminal; workers heed it only while they train, to save.
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, old)
        theirs.close()
        self.run: int | None = None

    def give(self, i: int, runs: Mapping[int, Run]) -> None:
        self.run = i
        with contextlib.suppress(ConnectionError):  # a dead worker is noticed when it is listened to
            self.pipe.send(runs[i])

    def hear(self) -> tuple[Any, ...]:
        try:
            return tuple(self.pipe.recv())
        except (EOFError, ConnectionError):
            self.process.join(5)
            code = self.process.exitcode
            return "failed", f"a worker ended with exit code {code}: run the same command again to go on"

    def stop(self) -> None:
        """Ask the process to save where it is, and wait until it has."""
        if self.run is not None and self.process.is_alive() and self.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; on Windows the second
                os.kill(self.process.pid, signal.SIGTERM)
        self.pipe.close()
        self.process.join()


def _work(pipe: Connection, folder: Path | None, root: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    load = Loader(folder)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            run: Run = pipe.recv()
            try:
                result = train(run, load(run), root, lambda *news: pipe.send(("progress", *news)))
            except LabError as error:
                pipe.send(("failed", str(error)))
                return
            pipe.send(("result", result))


def seconds(run: Run, load: Loader) -> float:
    """An estimate of the time that `run` takes here in one process, from a few updates and a little evaluation."""
    data, share = load(run), 1.0
    few = replace(run, evaluate=ONCE)  # tests are measured by themselves
    if isinstance(data, Images):  # evaluate a part
        size = len(data.test[: run.test_size])
        share = min(EVALUATION_BATCH / size, 1.0)
        few = replace(few, test_size=min(EVALUATION_BATCH, size))
    training = Training(few, data, Path())
    training.update()  # warm-up
    if training.outcome != "finished":
        return 0.0
    start, first = time.perf_counter(), training.done
    while (spent := time.perf_counter() - start) < MEASURED_SECONDS and training.done <= max(training.total, 2):
        training.update()
    update = spent / (training.done - first)
    start = time.perf_counter()
    training.test()
    evaluation = (time.perf_counter() - start) / share
    return training.total * (update + evaluation * run.batches / run.evaluate)
