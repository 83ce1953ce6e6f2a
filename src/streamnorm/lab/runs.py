"""What a run is: every setting of one training, frozen, with an address made of its contents."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

# Raised when the training loop changes what a run means: older results then do not count as the same run.
LOOP_VERSION = 1
GUARD_VERSION = 2  # likewise, when the guard of streaming norms changes what guarded runs mean
IMAGES = {"cifar10": 50_000, "digits": 1_437}  # how many there are to train on; any other name of data is a text
DEFAULT_DEVICE = "cpu"
ONCE = 1_000_000_000  # mini-batches between evaluations: at the end only
# Settings that came later than the first results, as JSON has them where they are off.
NORM_LATER: dict[str, Any] = {"guard": False, "eval_memory": 0.0, "schedule": []}
RUN_LATER: dict[str, Any] = {
    "side": 32,
    "held_out": 0,
    "standardized": False,
    "kept_scale": False,
    "decay": 0.0,
    "test_first": False,
    "start": 1.0,
    "gain": 1.0,
}


@dataclass(frozen=True)
class Norm:
    """A normalization as data.

    `kind`: "sample", "batch", "timed" (time-specific batch norm), "streaming", "group" (torch's own, four groups),
    "none", or a norm of `peers`: "renorm", "online", "mabn", "frn" and "zero" (none, with branches that begin at zero).
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
    eval_memory: float = 0.0  # likewise
    schedule: tuple[int, ...] = ()  # of "renorm" and "mabn", in mini-batches: see there


@dataclass(frozen=True)
class Run:
    """One training of one network. Two runs are the same if all of this is, and the data too."""

    net: str  # "A", "C" (B is C with unroll 1, 1), "D", "resnet", "rows" (an RNN over images), "rnn" or "gru"
    norm: Norm
    samples: int = 32  # per batch; of a text: parallel streams
    batches: int = 1  # per weight update
    unroll: tuple[int, int] = (1, 1)  # k1, k2 of net C; k, unused of net D
    tied: bool = True  # whether the unrolled steps of net C share their weights
    width: int = 64  # units of A and of the recurrent nets, channels of C and D, of the first stage of the resnet
    chunk: int = 100  # timesteps of truncated backpropagation through a text
    optimizer: str = "sgd"  # or "manhattan"
    momentum: float = 0.9
    rates: tuple[tuple[float, float], ...] = ((0.1, 25), (0.01, 5))  # learning rate, epochs
    data: str = "cifar10"  # or "digits", "shakespeare", the path of a text
    train_size: int | None = None  # images or characters; None: all
    test_size: int | None = None
    evaluate: int = 1  # mini-batches from one evaluation to the next
    seed: int = 0
    side: int = 32  # of the images, which are averaged down to it
    held_out: int = 0  # training images at the end of all, kept for validation
    standardized: bool = False  # whether the weights are: `weight_standardize`
    kept_scale: bool = False  # and have the scale that they began with
    decay: float = 0.0  # share of the training, at its end, in which the learning rate falls to 0, linearly
    test_first: bool = False  # whether a test comes before the update of its window, as in the paper, or after it
    start: float = 1.0  # a factor of the first weights that norms follow
    gain: float = 1.0  # that norms begin with
    device: str = DEFAULT_DEVICE  # where it is trained; of several of one type, which one is no setting

    @property
    def epochs(self) -> float:
        return sum(epochs for _, epochs in self.rates)

    @property
    def is_text(self) -> bool:
        return self.net in ("rnn", "gru")

    def rate(self, epoch: float) -> float:
        """The learning rate after so many epochs."""
        left = 1 - epoch / self.epochs
        return self._rate(epoch) * (min(left / self.decay, 1.0) if self.decay else 1.0)

    def _rate(self, epoch: float) -> float:
        for rate, epochs in self.rates:
            if epoch < epochs - 1e-9:
                return rate
            epoch -= epochs
        return self.rates[-1][0]

    def settings(self) -> dict[str, Any]:
        """As JSON has them: lists, no tuples. What came later than the first results is left out where it is off."""
        settings = located(json.loads(json.dumps(asdict(self))))
        for there, names in ((settings["norm"], NORM_LATER), (settings, RUN_LATER)):
            for name, off in names.items():
                if there[name] == off:
                    del there[name]
        return settings

    def address(self, fingerprint: str) -> str:
        """The run's name on disk; `fingerprint` is that of the data."""
        settings = self.settings() | {"data": fingerprint, "loop": LOOP_VERSION}
        if self.norm.guard:
            settings["guard"] = GUARD_VERSION
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def with_seed(self, seed: int) -> "Run":
        return replace(self, seed=seed)


def located(fields: dict[str, Any]) -> dict[str, Any]:
    """As files tell it: the type of the device, and nothing where it is the default, as before there were others."""
    kind = device_type(fields["device"])
    others = {name: value for name, value in fields.items() if name != "device"}
    return others if kind == DEFAULT_DEVICE else others | {"device": kind}


def device_type(device: str) -> str:
    """By its name: "cuda" of "cuda:1"."""
    return device.partition(":")[0]


def file_name(*parts: str, data: Iterable[str], device: str) -> str:
    """Of results: parts, the data where it is not the usual, and the type of the device where it is not the default."""
    kind = device_type(device)
    return "-".join([*parts, *data, *([] if kind == DEFAULT_DEVICE else [kind])])
