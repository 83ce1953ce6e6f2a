"""The comparison of norms, as data: nets, sizes of batch and window, norms, and the walk to a learning rate.

The unit is an `Entry`: a norm in a net at one size. Its runs differ in learning rate and seed. Rates lie on one ladder,
1, 3, 10, 30, ...; the first seed walks on it, and the other seeds are trained at the best rate and those close to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .grid import DEFAULT, held_out_of
from .runs import DEFAULT_DEVICE, IMAGES, Norm, Run, file_name

Size = tuple[int, int]  # samples per batch, batches per update
NETS = {
    "resnet-8": Run("resnet", Norm("none"), width=16, side=16),
    "convolutional-recurrent": Run("C", Norm("none"), width=16, unroll=(2, 2), side=16),
    "fully-connected": Run("A", Norm("none"), width=128),
    "recurrent": Run("rows", Norm("none"), width=128, chunk=4),
}
SIZES: tuple[Size, ...] = ((1, 1), (2, 1), (4, 1), (1, 32), (2, 16), (32, 1))
FIRST: tuple[Size, ...] = ((2, 1), (1, 32))  # in the order of the work; the others follow
FULL = 32  # samples per update, from which on a run is the longer one
IMAGES_SEEN = {False: (6_000, 1), True: (8_000, 2)}  # images and passes, by whether the window is full
TEST_SIZE, SEEDS = 4_000, 3
MOMENTUM = 0.9
DECAY = 0.5  # share of the training, at its end, in which the rate falls to 0: see docs/measured/compare.md
TAIL = 0.1  # share of the training, at its end, that the training loss is of

STREAMING = DEFAULT  # the library's default
WS = " + WS"  # weight standardization
OPEN_ENDED = ("convolutional-recurrent",)  # branches end in a convolution, whose scale no norm takes out: it is kept
NORMS = {
    "none": Norm("zero"),
    "batch norm": Norm("batch"),
    "layer norm": Norm("sample", ref="SP1"),
    "group norm": Norm("group"),
    "group norm" + WS: Norm("group"),
    "Batch Renorm": Norm("renorm"),
    "Online Norm": Norm("online"),
    "MABN": Norm("mabn"),
    "FRN + TLU": Norm("frn"),
    "streaming": STREAMING,
    "streaming" + WS: STREAMING,
}
# Ours, and whom it is measured against: all others without weight standardization, or those that change the weights.
RIVALS = {
    "streaming": tuple(norm for norm in NORMS if not norm.endswith(WS) and norm != "streaming"),
    "streaming" + WS: ("group norm" + WS, "MABN"),
}
ALONE = ("none", "layer norm", "group norm", "group norm" + WS, "FRN + TLU")  # treat each sample by itself

# The ladder. A rung r is the rate 10^(r / 2), in one digit.
LOWEST, HIGHEST = -10, 2
# Where the walk begins, by samples per update.
STARTS = {1: -6, 2: -5, 4: -5, FULL: -3}
GENTLE = 1  # so many rungs lower in nets without convolutions
# Points within which rates are as good as far as one seed can tell: the standard error of the difference of two
# accuracies on the images held out. All seeds are trained at such rates, and decide.
CLOSE = 1.5
UNLEARNED = 12.0  # accuracy in per cent, up to which nothing has been learned


def is_convolutional(net: str) -> bool:
    return net in ("resnet-8", "convolutional-recurrent")


def norms_of(net: str) -> list[str]:
    """Those that a net can have: weights of an RNN are not standardized, FRN needs space, layer norm needs none."""
    left_out = {"layer norm"} if is_convolutional(net) else {"FRN + TLU"}
    if net == "recurrent":
        left_out |= {norm for norm in NORMS if norm.endswith(WS)}
    return [norm for norm in NORMS if norm not in left_out]


def can_run(net: str, norm: str, samples: int) -> bool:
    """In a net without space the mean of one sample is the sample: nothing is left for batch norms to learn from."""
    return norm not in ("batch norm", "Batch Renorm") or is_convolutional(net) or samples > 1


def rate_of(rung: int) -> float:
    return float(f"{10 ** (rung / 2):.1g}")


RUNGS = {rate_of(rung): rung for rung in range(LOWEST, HIGHEST + 1)}


def best_rung(found: Mapping[int, float], start: int) -> int:
    """By accuracy; of equals the nearest to the start."""
    return max(found, key=lambda rung: (found[rung], -abs(rung - start), -rung))


def close_rungs(found: Mapping[int, float]) -> list[int]:
    """Where a walk may have ended, had the first seed been another."""
    top = max(found.values())
    return sorted(rung for rung, accuracy in found.items() if top - accuracy <= CLOSE)


def next_rungs(found: Mapping[int, float], start: int) -> list[int]:
    """The rungs to try next, by the accuracies found so far: none if the best has a worse neighbour on both sides.

    Neighbours that are as good count as one with it. After the first three it is one at a time, so that what
    comes next does not depend on the order in which runs have ended: a walk that was stopped goes on as it was.
    """
    first = [rung for rung in (start - 1, start, start + 1) if rung not in found]
    if first:
        return first
    low = high = best_rung(found, start)
    top = found[low]
    while found.get(low - 1) == top:
        low -= 1
    while found.get(high + 1) == top:
        high += 1
    around = [low - 1, high + 1] if top > UNLEARNED else [min(found) - 1]  # too high for all so far
    return [rung for rung in around if rung not in found and LOWEST <= rung <= HIGHEST][:1]


@dataclass(frozen=True)
class Entry:
    net: str
    norm: str
    samples: int
    batches: int

    @property
    def window(self) -> int:
        return self.samples * self.batches

    @property
    def trained(self) -> "Entry":
        """The entry whose runs are taken for this one: to norms of single samples all splits of a window are the same.

        Online Norm goes sample by sample, so it is one of them, but not where a sample calls it at several timesteps.
        """
        online = self.norm == "Online Norm" and self.net in ("resnet-8", "fully-connected")
        alone = self.norm in ALONE or online
        return replace(self, samples=self.window, batches=1) if alone and self.window == FULL else self

    @property
    def start(self) -> int:
        begin = next((STARTS[size] for size in STARTS if self.window <= size), STARTS[FULL])
        return begin - (0 if is_convolutional(self.net) else GENTLE)

    def run(self, rung: int, seed: int, size: int | None = None, data: str = "cifar10") -> Run:
        """`size`: images to train on at most."""
        held_out = held_out_of(data)
        images, passes = IMAGES_SEEN[self.window >= FULL]
        images = min(images, IMAGES[data] - held_out, size or images)
        batches = passes * (images // self.window) * self.batches
        return replace(
            NETS[self.net],
            norm=replace(NORMS[self.norm], schedule=self.schedule(batches)),
            samples=self.samples,
            batches=self.batches,
            momentum=MOMENTUM,
            rates=((rate_of(rung), passes),),
            decay=DECAY,
            data=data,
            train_size=images,
            test_size=TEST_SIZE,
            held_out=held_out,
            evaluate=max(round((1 - TAIL) * batches), 1),
            standardized=self.norm.endswith(WS),
            kept_scale=self.norm.endswith(WS) and self.net in OPEN_ENDED,
            seed=seed,
        )

    def schedule(self, batches: int) -> tuple[int, ...]:
        """Of a training of so many mini-batches; the papers' own are for much longer ones."""
        if self.norm == "Batch Renorm":
            return batches * 5 // 130, batches * 25 // 130, batches * 40 // 130
        if self.norm == "MABN":
            return max(FULL // self.samples, 1), min(100, batches // 10), min(1_000, batches // 5)
        return ()


@dataclass(frozen=True)
class Plan:
    """What is compared in one net. `size`: images to train on at most; None: as many as IMAGES_SEEN says."""

    net: str
    sizes: tuple[Size, ...] = SIZES
    norms: tuple[str, ...] = tuple(NORMS)
    seeds: int = SEEDS
    size: int | None = None
    data: str = "cifar10"
    device: str = DEFAULT_DEVICE

    @property
    def file_name(self) -> str:
        other = [] if self.data == "cifar10" else [self.data]
        return file_name("compare", self.net, data=other, device=self.device)

    @property
    def rows(self) -> list[str]:
        """The norms of the table."""
        return [norm for norm in norms_of(self.net) if norm in self.norms]

    @property
    def command(self) -> str:
        """That trains this."""
        words = [f"streamnorm compare --net {self.net}"]
        if self.sizes != SIZES:
            words.append(f"--sizes {','.join(map(size_name, self.sizes))}")
        if set(self.rows) != set(norms_of(self.net)):
            words.append(f'--norms "{",".join(self.rows)}"')
        others = {"seeds": (self.seeds, SEEDS), "size": (self.size, None), "data": (self.data, "cifar10")}
        others |= {"device": (self.device, DEFAULT_DEVICE)}
        words += [f"--{name} {value}" for name, (value, usual) in others.items() if value != usual]
        return " ".join(words)

    def run(self, entry: "Entry", rung: int, seed: int) -> Run:
        return replace(entry.run(rung, seed, self.size, self.data), device=self.device)

    def entries(self, norms: Sequence[str], sizes: Sequence[Size]) -> list[Entry]:
        """Those that can run, each once as it is trained."""
        found = [Entry(self.net, norm, *size) for size in sizes for norm in norms if can_run(self.net, norm, size[0])]
        return list(dict.fromkeys(entry.trained for entry in found))


def size_name(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


@dataclass(frozen=True)
class Stage:
    """A part of the work: entries whose runs are trained together."""

    plan: Plan
    entries: tuple[Entry, ...]
    seeds: int  # up to which


def stages(plans: Sequence[Plan]) -> Iterator[Stage]:
    """The order of the work: the peers before ours, the first seed of all before the others, sizes as in FIRST."""
    for ours in (False, True):
        for others in (False, True):
            for plan in plans:
                done: set[Entry] = set()
                norms = [norm for norm in plan.rows if (norm in RIVALS) == ours]
                for size in sorted(plan.sizes, key=lambda size: FIRST.index(size) if size in FIRST else len(FIRST)):
                    entries = [entry for entry in plan.entries(norms, [size]) if entry not in done]
                    done.update(entries)
                    if entries and (plan.seeds > 1 or not others):
                        yield Stage(plan, tuple(entries), plan.seeds if others else 1)
