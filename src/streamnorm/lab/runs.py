"""What a run is: every setting of one training, frozen, with an address made of its contents."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

# Raised when the training loop changes what a run means: older results then do not count as the same run.
LOOP_VERSION = 1
IMAGES = {"cifar10": 50_000, "digits": 1_437}  # how many there are to train on; any other name of data is a text


@dataclass(frozen=True)
class Norm:
    """A normalization as data.

    `kind`: "sample", "batch", "timed" (time-specific batch norm), "streaming", "group" (torch's own, four groups) or
    "none".
    """

    kind: str
    ref: str = "BA1"
    p: float = 2.0
    center: str = "mean"
    alpha: tuple[float, float] = (0.7, 0.3)
    beta: tuple[float, float, float] = (0.7, 0.3, 0.0)
    warmup: int = 256  # ours, not the paper's: see the design
    momentum: float = 0.1  # of the running estimates of batch norms
    eps: float = 1e-5
    guard: bool = False  # ours, not the paper's; figures of the paper do without


@dataclass(frozen=True)
class Run:
    """One training of one network. Two runs are the same if all of this is, and the data too."""

    net: str  # "A", "C" (B is C with unroll 1, 1), "D", "rows" (an RNN over images), "rnn" or "gru"
    norm: Norm
    samples: int = 32  # per batch; of a text: parallel streams
    batches: int = 1  # per weight update
    unroll: tuple[int, int] = (1, 1)  # k1, k2 of net C; k, unused of net D
    tied: bool = True  # whether the unrolled steps of net C share their weights
    width: int = 64  # units of A and of the recurrent nets, channels of C and D
    chunk: int = 100  # timesteps of truncated backpropagation through a text
    optimizer: str = "sgd"  # or "manhattan"
    momentum: float = 0.9
    rates: tuple[tuple[float, float], ...] = ((0.1, 25), (0.01, 5))  # learning rate, epochs
    data: str = "cifar10"  # or "digits", "shakespeare", the path of a text
    train_size: int | None = None  # images or characters; None: all
    test_size: int | None = None
    evaluate: int = 1  # mini-batches from one evaluation to the next
    seed: int = 0

    @property
    def epochs(self) -> float:
        return sum(epochs for _, epochs in self.rates)

    @property
    def is_text(self) -> bool:
        return self.net in ("rnn", "gru")

    def rate(self, epoch: float) -> float:
        """The learning rate after so many epochs."""
        for rate, epochs in self.rates:
            if epoch < epochs - 1e-9:
                return rate
            epoch -= epochs
        return self.rates[-1][0]

    def settings(self) -> dict[str, Any]:
        """As JSON has them: lists, no tuples. What came later than the first results is left out where it is off."""
        settings = dict(json.loads(json.dumps(asdict(self))))
        if not self.norm.guard:
            del settings["norm"]["guard"]
        return settings

    def address(self, fingerprint: str) -> str:
        """The run's name on disk; `fingerprint` is that of the data."""
        settings = self.settings() | {"data": fingerprint, "loop": LOOP_VERSION}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def with_seed(self, seed: int) -> "Run":
        return replace(self, seed=seed)
