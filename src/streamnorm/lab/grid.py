"""Online learning, as data: every kind of network at every size of batch and window, over two decades of rates.

One pass over a few thousand samples with plain SGD. The unit is a `Place`: a network, a norm, samples per batch and
batches per update; its runs differ in learning rate and seed. A `Grid` is all places of a network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .runs import DEFAULT_DEVICE, IMAGES, ONCE, Norm, Run, file_name

SAMPLES, BATCHES = (1, 2, 4, 8, 32), (1, 8, 32)
# For one sample per update; multiplied by the root of the samples per update.
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
CONV_RATES = (0.001, 0.01, 0.1)
SIZE, TEST_SIZE, SEEDS = 4_000, 2_000, 3
HELD_OUT = 2_000  # training images at most, which choose the learning rate

NETS = {
    "fully-connected": Run("A", Norm("none"), width=128),
    "recurrent": Run("rows", Norm("none"), width=128, chunk=4),
    "convolutional": Run("C", Norm("none"), width=16),
    "convolutional-recurrent": Run("C", Norm("none"), width=16, unroll=(2, 2)),
}
# The norm that ours is measured against, and is to be as good as.
RIVALS = {
    "fully-connected": "layer norm",
    "recurrent": "layer norm",
    "convolutional": "group norm",
    "convolutional-recurrent": "group norm",
}
OURS = "streaming"
LITERAL = Norm("streaming", center="running")
DEFAULT = replace(LITERAL, guard=True, eval_memory=64.0)  # of the library; a test compares
LASTING = replace(LITERAL, alpha=(0.97, 0.03))  # a memory ten times as long
NORMS = {
    "none": Norm("none"),
    "layer norm": Norm("sample", ref="SP1"),
    "group norm": Norm("group"),
    "batch norm": Norm("batch"),
    "streaming, guard=False": LITERAL,
    "streaming": DEFAULT,
    "streaming (.97, .03), guard=False": LASTING,
    "streaming (.97, .03)": replace(DEFAULT, alpha=LASTING.alpha),
}


@dataclass(frozen=True)
class Place:
    net: str
    norm: str
    samples: int
    batches: int

    def rate(self, base: float) -> float:
        return float(f"{base * (self.samples * self.batches) ** 0.5:.2g}")

    def run(self, base: float, seed: int, size: int, data: str = "cifar10", held_out: int = 0) -> Run:
        """A run of this place. Where the guard or the memory for evaluation have nothing to do, it is without them."""
        # Need torch, and the command line reads this file to answer at once.
        from ..core.algorithm import ALIKE, FULL

        norm, window = NORMS[self.norm], self.samples * self.batches
        images = is_convolutional(self.net)
        elements = window * (ALIKE if images else 1)  # as the guard counts: a sequence once
        calls = self.batches * max(NETS[self.net].unroll)  # of a norm in a window
        guarded = elements < FULL or (images and calls > 1)  # few samples, or large ones in several calls
        # Without space or time it never is.
        averaged = self.net != "fully-connected" and window < norm.alpha[1] * norm.eval_memory
        return replace(
            NETS[self.net],
            norm=replace(
                norm,
                guard=norm.guard and guarded,
                eval_memory=norm.eval_memory if averaged else 0.0,
            ),
            samples=self.samples,
            batches=self.batches,
            momentum=0.0,
            rates=((self.rate(base), 1),),
            data=data,
            train_size=size,
            test_size=TEST_SIZE,
            held_out=held_out,
            evaluate=ONCE,
            seed=seed,
        )


def held_out_of(data: str) -> int:
    return min(HELD_OUT, IMAGES[data] // 5)


def is_convolutional(net: str) -> bool:
    return net.startswith("convolutional")


def rates_of(net: str) -> tuple[float, ...]:
    return CONV_RATES if is_convolutional(net) else RATES


def norms_of(net: str) -> list[str]:
    """Layer norm or group norm, whichever is usual in such a network, and all others."""
    return [norm for norm in NORMS if norm == RIVALS[net] or norm not in RIVALS.values()]


def can_run(net: str, norm: str, samples: int) -> bool:
    """Batch norm cannot on batches of one, in a net without space; it is not tried there."""
    return norm != "batch norm" or is_convolutional(net) or samples > 1


def places(net: str, samples: Sequence[int] = SAMPLES, batches: Sequence[int] = BATCHES) -> Iterator[Place]:
    """All places of a network."""
    for norm in norms_of(net):
        for size in samples:
            for count in batches:
                if can_run(net, norm, size):
                    yield Place(net, norm, size, count)


@dataclass(frozen=True)
class Grid:
    """What is measured of one network. `rates`: for one sample per update.

    `held_out`: training images that choose the rate; 0 in older files, where the test images do.
    """

    net: str
    samples: tuple[int, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: int
    size: int
    data: str
    device: str = DEFAULT_DEVICE
    held_out: int = 0

    @property
    def file_name(self) -> str:
        other = [] if self.data == "cifar10" else [self.data]
        return file_name("online", self.net, data=other, device=self.device)

    @property
    def command(self) -> str:
        """That measures this."""
        others = {
            "samples": (self.samples, SAMPLES),
            "batches": (self.batches, BATCHES),
            "rates": (self.rates, rates_of(self.net)),
            "size": (self.size, SIZE),
            "seeds": (self.seeds, SEEDS),
            "data": (self.data, "cifar10"),
            "device": (self.device, DEFAULT_DEVICE),
        }
        words = [f"--{name} {_text(value)}" for name, (value, usual) in others.items() if value != usual]
        return " ".join([f"streamnorm bench-online --net {self.net}", *words])

    def runs(self) -> dict[tuple[Run, float], list[Place]]:
        """All distinct runs, by run and rate, one seed after the other, each with the places that share it."""
        found: dict[tuple[Run, float], list[Place]] = {}
        for seed in range(self.seeds):
            for place in places(self.net, self.samples, self.batches):
                for base in self.rates:
                    run = replace(place.run(base, seed, self.size, self.data, self.held_out), device=self.device)
                    found.setdefault((run, base), []).append(place)
        return found


def _text(value: object) -> str:
    """As an option has it; a rate without its point would be a number of rates."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
