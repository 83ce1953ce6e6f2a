"""One training, from a frozen run to a result, that can be stopped at any moment and goes on exactly.

A run lives in a folder named by its contents:
    checkpoint.pt   everything needed to go on, replaced as a whole now and then; gone when the run has ended
    metrics.jsonl   one line per evaluation, to watch while it trains
    result.json     the end: settings, versions, curves, outcome
"""

import io
import json
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from .. import DecoupledUpdate, Manhattan, __version__
from .data import Images, Text
from .devices import called, on_cpu
from .health import GradientNorm, health
from .models import build
from .results import RESULT, read_run
from .runs import LOOP_VERSION, Run
from .shapes import fit
from .store import complaining, locked, read_sealed, refused, sweep, write_json, write_sealed, write_text
from .tasks import Scores, Task, make_task

Report = Callable[[int, int, float], None]  # updates done, updates in all, the latest loss
Row = dict[str, Any]
CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
REPORT_SECONDS = 0.2
KEPT = {
    "done": int,
    "model": {},
    "optimizer": {},
    "task": {},
    "random": torch.Tensor,
    "rows": str,
    "sums": list,
    "count": int,
    "seconds": float,
    "outcome": str,
    "message": str,
}


def train(
    run: Run,
    data: Images | Text,
    root: Path,
    report: Report | None = None,
    every: float = 30.0,
    stopped: Callable[[], bool] = lambda: False,
) -> Row:
    """The result of `run`: read if it is there, gone on with if it was begun, trained otherwise.

    `root`: the folder of all runs. `report` hears of progress a few times a second. `every`: seconds between
    checkpoints. `stopped` is asked after every update; it stops a run as Ctrl-C does.
    """
    folder = root / run.address(data.fingerprint)
    if (before := read_run(folder)) is not None:
        return before
    with locked(folder):
        if (before := read_run(folder)) is not None:  # another process has just ended it
            return before
        sweep(folder)
        training = Training(run, data, folder)
        training.resume()
        try:
            training.go_on(report or (lambda done, total, loss: None), every, stopped)
        finally:
            training.log.close()
        result = training.result()
        write_json(folder / RESULT, result)
        (folder / CHECKPOINT).unlink(missing_ok=True)
        return result


def is_done(run: Run, data: Images | Text, root: Path) -> bool:
    return (root / run.address(data.fingerprint) / RESULT).exists()


def make_optimizer(run: Run, model: nn.Module) -> DecoupledUpdate:
    rate = run.rates[0][0]
    if run.optimizer == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), rate, momentum=run.momentum)
    elif run.optimizer == "manhattan":
        inner = Manhattan(model.parameters(), rate, momentum=run.momentum)
    else:
        raise ValueError(f"optimizer {run.optimizer!r}: must be sgd or manhattan")
    return DecoupledUpdate(inner, run.batches)


class Training:
    """The state of one training: what `checkpoint.pt` holds, plus what follows from the run."""

    def __init__(self, run: Run, data: Images | Text, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.fingerprint = data.fingerprint
        self.task: Task = make_task(run, data)
        torch.manual_seed(run.seed)
        model = build(run, len(data.symbols) if isinstance(data, Text) else 0)  # the same first weights on all devices
        self.model = model.to(run.device)
        self.optimizer = make_optimizer(run, self.model)
        self.gradient = GradientNorm(self.optimizer.optimizer)
        self.total = round(run.epochs * self.task.updates)
        self.log = Log(folder)
        self.done = 0  # weight updates
        self.rows: list[Row] = []
        self.outcome, self.message = "finished", ""
        self.seconds = 0.0
        self.sums = [0.0, 0.0]  # of loss and error since the last row
        self.count = 0  # mini-batches since the last row
        self.latest = math.nan  # loss of the last mini-batch
        self.scores: Scores = {}  # of the latest test

    def go_on(self, report: Report, every: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """The training loop."""
        started = reported = saved = time.monotonic()
        before = self.seconds
        with asked_to_stop() as stop:
            while self.done < self.total and self.outcome == "finished":
                self.update()
                now = time.monotonic()
                self.seconds = before + now - started
                if self.due():
                    self.note()
                if stop.is_set() or stopped():
                    self.save()
                    raise KeyboardInterrupt
                if now - saved > every:
                    self.save()
                    saved = time.monotonic()
                if now - reported > REPORT_SECONDS or self.done == self.total:
                    report(self.done, self.total, self.latest)
                    reported = now

    def update(self) -> None:
        """One weight update: `run.batches` mini-batches, whose gradients are averaged."""
        epoch, update = divmod(self.done, self.task.updates)
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = self.run.rate(self.done / self.task.updates)
        self.gradient.wanted = due = self.is_due(self.count + self.run.batches, self.done + 1)
        for i, (x, y) in enumerate(self.task.batches(epoch, update), 1):
            try:
                loss, error = self.task.loss(self.model, x, y)
            except ValueError as refusal:
                if self.done or not self.may_be_refused:
                    raise
                self.outcome, self.message = "refused", str(refusal)
                return
            loss.backward()  # type: ignore[no-untyped-call]
            last = due and i == self.run.batches
            if last and self.run.test_first:
                self.test()
            self.optimizer.step()
            if last and not self.run.test_first:
                self.test()
            self.latest = float(loss.detach())
            self.sums[0] += self.latest
            self.sums[1] += 0.0 if error is None else float(error)
            self.count += 1
        self.done += 1

    @property
    def may_be_refused(self) -> bool:
        """Whether the norm takes the statistics of a batch of one: that it cannot is a result too."""
        return self.run.samples == 1 and self.run.norm.kind in ("batch", "timed")

    def is_due(self, count: int, done: int) -> bool:
        """Whether a test belongs to the state after so many mini-batches since the last row, and weight updates."""
        return count >= self.run.evaluate or done == self.total

    def due(self) -> bool:
        return self.outcome == "finished" and self.is_due(self.count, self.done)

    def note(self) -> None:
        """A row of the log: training since the last one, the latest test, and the health of the network."""
        row = {
            "update": self.done,
            "epoch": round(self.done / self.task.updates, 4),
            "rate": self.optimizer.optimizer.param_groups[0]["lr"],
            "train_loss": self.sums[0] / self.count,
        }
        if "test_error" in self.scores:
            row["train_error"] = self.sums[1] / self.count
        row |= self.scores | health(self.model, self.gradient.norm)
        if not (math.isfinite(row["train_loss"]) and math.isfinite(row["test_loss"])):
            self.outcome, self.message = "diverged", f"the loss is not finite after {self.done} updates"
        # Not a number is no JSON: absent values are null. Six digits are more than any claim rests on.
        rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        self.rows.append({k: v if math.isfinite(v) else None for k, v in rounded.items()})
        self.log.write(self.rows[-1])
        self.sums, self.count = [0.0, 0.0], 0

    def test(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.scores = self.task.evaluate(self.model)
        self.model.train()

    def save(self) -> None:
        state = {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "task": self.task.state_dict(),
            "random": torch.get_rng_state(),
            "rows": json.dumps(self.rows),
            "sums": self.sums,
            "count": self.count,
            "seconds": self.seconds,
            "outcome": self.outcome,
            "message": self.message,
        }
        contents = io.BytesIO()  # first in memory: torch has its own words for a full disk
        torch.save(on_cpu(state), contents)
        write_sealed(self.folder / CHECKPOINT, contents.getvalue())

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        path = self.folder / CHECKPOINT
        if path.exists():
            state = load_checkpoint(path)
            try:
                self.take(state)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise refused(
                    path, "is no checkpoint of this run", error, "remove it to begin this run again"
                ) from error
        self.log.start(self.rows)

    def take(self, state: dict[str, Any]) -> None:
        """What `save` kept."""
        fit(state, KEPT)
        rows = json.loads(state["rows"])
        fit(rows, [{"update": int}], "rows")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.task.load_state_dict(state["task"])
        torch.set_rng_state(state["random"])
        self.done, self.rows = state["done"], rows
        self.sums, self.count, self.seconds = state["sums"], state["count"], state["seconds"]
        self.outcome, self.message = state["outcome"], state["message"]

    def result(self) -> Row:
        columns = {name: [row.get(name) for row in self.rows] for name in (self.rows[0] if self.rows else {})}
        return {
            "id": self.folder.name,
            "settings": self.run.settings(),
            "data": self.fingerprint,
            "outcome": self.outcome,
            "message": self.message,
            "curves": columns,
            "chance": self.task.chance,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "updates": self.done,
            "seconds": round(self.seconds, 1),
            "threads": torch.get_num_threads(),
            "device": called(torch.device(self.run.device)),
            "versions": versions(),
        }


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(io.BytesIO(read_sealed(path)), weights_only=True))
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, UnpicklingError) as error:
        raise refused(path, "is damaged", error, "remove it to begin this run again") from error


def versions() -> dict[str, str]:
    return {
        "streamnorm": __version__,
        "loop": str(LOOP_VERSION),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


class Log:
    """metrics.jsonl, and TensorBoard where it is installed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.board: Any = None

    def start(self, rows: list[Row]) -> None:
        """Begin with the rows of the checkpoint: what was written after it will be written again."""
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        after = rows[-1]["update"] + 1 if rows else 0
        with complaining(self.path.parent / "tensorboard"):
            self.board = SummaryWriter(self.path.parent / "tensorboard", purge_step=after)

    def write(self, row: Row) -> None:
        with complaining(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        with complaining(self.path.parent / "tensorboard"):
            for name, value in row.items() if self.board else ():
                if value is not None and name != "update":
                    self.board.add_scalar(name, value, row["update"])

    def close(self) -> None:
        if self.board:
            with suppress(OSError):  # what made it fail is being said already
                self.board.close()


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM, so that the loop can end at a whole update; a second Ctrl-C ends it at once.

    Workers are sent SIGTERM after the Ctrl-C that the terminal has sent to all: two kinds are no second time.
    """
    asked, heard = threading.Event(), set[int]()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if number in heard:
            raise KeyboardInterrupt
        heard.add(number)
        asked.set()

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
