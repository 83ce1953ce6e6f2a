"""What is learned: images or a text, cut into mini-batches. Batches are made by indexing, in the training process."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import Images, Text
from .errors import DataError
from .runs import Run

Scores = dict[str, float]  # "loss", and for images "error": the share that is wrong
CLASSES = 10
EVALUATION_BATCH = 250
VALIDATION_STREAMS = 64
IMAGE_CHANCE: Scores = {"loss": math.log(CLASSES), "error": 1 - 1 / CLASSES}  # what guessing gives


class Task(Protocol):
    """A source of mini-batches that a run learns from. `updates`: weight updates in one epoch, all windows full."""

    updates: int
    chance: Scores  # what guessing gives

    def batches(self, epoch: int, update: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches of one weight update."""

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The mean loss, and the share of wrong answers."""

    def evaluate(self, model: nn.Module) -> Scores: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ImageTask:
    """Classification, with a new order of the images in each epoch.

    What is left over when an epoch is cut into full windows is not seen in that epoch; all curves with the same number
    of samples per update then update equally often, on the same samples.
    """

    def __init__(self, run: Run, images: Images) -> None:
        self.run = run
        self.chance = IMAGE_CHANCE
        there = len(images.train) - run.held_out
        size = there if run.train_size is None else min(run.train_size, there)
        self.x, self.y = self.there(images.train[:size], images.train_labels[:size])
        self.test = self.there(images.test[: run.test_size], images.test_labels[: run.test_size])
        self.valid = self.there(images.train[there:], images.train_labels[there:])
        self.mean, self.std = (s.reshape(-1, 1, 1).to(run.device) for s in (images.mean, images.std))
        self.window = run.samples * run.batches
        self.updates = len(self.x) // self.window
        if not self.updates:
            raise DataError(f"{len(self.x)} training images make no update of {self.window}: use more images")
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.long)

    def batches(self, epoch: int, update: int) -> Iterator[tuple[Tensor, Tensor]]:
        if epoch != self.epoch:
            generator = torch.Generator(device="cpu").manual_seed(self.run.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.x), generator=generator, device="cpu")  # the same for all devices
            self.epoch, self.order = epoch, order.to(self.run.device)
        chosen = self.order[update * self.window : (update + 1) * self.window]
        x, y = self.standardised(self.x[chosen]), self.y[chosen]
        yield from zip(torch.split(x, self.run.samples), torch.split(y, self.run.samples), strict=True)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = model(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) != y).float().mean()

    def evaluate(self, model: nn.Module) -> Scores:
        """Of the test images, and of the training images that are held out, if there are any."""
        held_out = self.scores("valid", model, *self.valid) if self.run.held_out else {}
        return self.scores("test", model, *self.test) | held_out

    def scores(self, part: str, model: nn.Module, images: Tensor, labels: Tensor) -> Scores:
        loss = error = 0.0
        parts = (torch.split(each, EVALUATION_BATCH) for each in (images, labels))
        for x, y in zip(*parts, strict=True):
            logits = model(self.standardised(x))
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            error += float((logits.argmax(1) != y).sum())
        return {f"{part}_loss": loss / len(labels), f"{part}_error": error / len(labels)}

    def there(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """On the device of the run: batches are cut there."""
        return self.small(images).to(self.run.device), labels.to(self.run.device)

    def small(self, images: Tensor) -> Tensor:
        """Averaged down to the side of the run."""
        factor = images.shape[-1] // self.run.side
        return images if factor == 1 else F.avg_pool2d(images.float(), factor)

    def standardised(self, images: Tensor) -> Tensor:
        return images.float().sub(self.mean).div_(self.std)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TextTask:
    """The next character, in parallel contiguous streams; the hidden state is carried from chunk to chunk.

    The batches of one update are successive chunks of the same streams. An epoch begins with a zero state.
    """

    def __init__(self, run: Run, text: Text) -> None:
        self.run = run
        self.state: Tensor | None = None
        self.streams = _streams(text.train[: run.train_size], run.samples).to(run.device)
        valid = text.valid[: run.test_size]
        self.valid = _streams(valid, max(min(VALIDATION_STREAMS, len(valid) // (run.chunk + 1)), 1)).to(run.device)
        self.updates = (self.streams.shape[0] - 1) // run.chunk // run.batches
        if not self.updates:
            raise DataError(
                f"a text of {len(text.train)} characters makes no update of {run.samples} streams x {run.batches} "
                f"chunks of {run.chunk}: use a longer text"
            )
        self.chance = {"loss": math.log(len(text.symbols))}

    def batches(self, epoch: int, update: int) -> Iterator[tuple[Tensor, Tensor]]:
        if update == 0:
            self.state = None
        for i in range(update * self.run.batches, (update + 1) * self.run.batches):
            yield _chunk(self.streams, i * self.run.chunk, self.run.chunk)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, self.state = model(x, self.state)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), None

    def evaluate(self, model: nn.Module) -> Scores:
        state, loss, count = None, 0.0, 0
        for start in range(0, self.valid.shape[0] - 1, self.run.chunk):
            x, y = _chunk(self.valid, start, self.run.chunk)
            logits, state = model(x, state)
            loss += float(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
            count += y.numel()
        return {"test_loss": loss / count}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = None if state["state"] is None else state["state"].to(self.run.device)


def _streams(text: Tensor, streams: int) -> Tensor:
    """`(T, streams)`: the text in equal contiguous parts side by side; what is over at the end is left out."""
    length = len(text) // max(streams, 1)
    return text[: length * streams].view(streams, length).t()


def _chunk(streams: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Characters and those that follow them, `(T, streams)` each."""
    part = streams[start : start + length + 1].long()
    return part[:-1], part[1:]


def make_task(run: Run, data: Images | Text) -> Task:
    return TextTask(run, data) if isinstance(data, Text) else ImageTask(run, data)
