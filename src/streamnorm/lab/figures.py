"""The paper's figures as data: a caption and a list of frozen runs each, at the paper's own scale.

Every image network is trained as in section 6 of the design; only what a figure varies stands here. To try something
else, change a line or add one: a changed setting is a new run, all others are found again by their contents.
"""

from dataclasses import dataclass

from .runs import Norm, Run


@dataclass(frozen=True)
class Curve:
    label: str
    run: Run


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    caption: str
    paper: str  # what the paper says that its figure shows
    curves: tuple[Curve, ...]
    zoom: bool = False  # whether the paper shows its panels a second time, enlarged

    def __getitem__(self, label: str) -> Run:
        return next(curve.run for curve in self.curves if curve.label == label)


LAYER_NORM = Norm("sample", ref="SP1")
BATCH_NORM = Norm("batch")
TIME_SPECIFIC = Norm("timed")
# "Ours" in the paper's figures: three settings, one for each group of experiments.
STREAMING_ONLINE = Norm("streaming", p=1.0, center="running", alpha=(0.7, 0.3), beta=(0.7, 0.3, 0.0))
STREAMING_CONV = Norm("streaming", p=2.0, center="mean", alpha=(0.5, 0.5), beta=(0.5, 0.5, 0.0))
STREAMING_RECURRENT = Norm("streaming", p=2.0, center="running", alpha=(0.7, 0.3), beta=(0.7, 0.0, 0.3))


def sample(ref: str) -> Norm:
    return Norm("sample", ref=ref)


def batch(ref: str = "BA1", p: float = 2.0) -> Norm:
    return Norm("batch", ref=ref, p=p)


def streaming(ref: str) -> Norm:
    """The settings of figure conv with another reference."""
    return Norm("streaming", ref=ref, center="mean", alpha=(0.5, 0.5), beta=(0.5, 0.5, 0.0))


def with_beta(*beta: float) -> Norm:
    one, two, three = beta
    return Norm("streaming", center="running", alpha=(0.7, 0.3), beta=(one, two, three))


def fully_connected(norm: Norm, samples: int, batches: int) -> Run:
    return Run("A", norm, samples, batches, width=512, test_first=True)


def convolutional(norm: Norm, samples: int = 32, batches: int = 1, unroll: tuple[int, int] = (1, 1)) -> Run:
    return Run("C", norm, samples, batches, unroll=unroll, test_first=True)


def densely_recurrent(norm: Norm, samples: int, batches: int) -> Run:
    return Run("D", norm, samples, batches, unroll=(5, 0), test_first=True)


def text(net: str, norm: Norm, samples: int, batches: int) -> Run:
    rates = ((0.01, 2), (0.001, 1))
    common = {"width": 100, "chunk": 100, "optimizer": "manhattan", "momentum": 0.0, "evaluate": 20, "test_first": True}
    return Run(net, norm, samples, batches, rates=rates, data="shakespeare", **common)  # type: ignore[arg-type]


def all_references(unroll: tuple[int, int]) -> tuple[Curve, ...]:
    names = {"SP1": "SP1 (LN)", "BA1": "BA1 (BN)"}
    refs = [f"SP{i}" for i in range(1, 6)] + [f"BA{i}" for i in range(1, 7)]
    norms = [(names.get(ref, ref), sample(ref) if ref.startswith("SP") else batch(ref)) for ref in refs]
    norms.append(("streaming", STREAMING_CONV))
    return tuple(Curve(label, convolutional(norm, unroll=unroll)) for label, norm in norms)


def characters(net: str) -> tuple[Curve, ...]:
    return (
        Curve("LN", text(net, LAYER_NORM, 64, 1)),
        Curve("TSBN", text(net, TIME_SPECIFIC, 64, 1)),
        Curve("streaming", text(net, STREAMING_RECURRENT, 32, 2)),
    )


LP = Figure(
    "lp",
    "Lp normalization",
    "Batch normalization by the p-th absolute moment, in a feedforward convolutional network (B).",
    "All statistical moments perform similarly well; L7 is slightly worse.",
    tuple(Curve(f"p = {p}", convolutional(batch(p=float(p)))) for p in (1, 2, 3, 5, 7)),
)
DAU = Figure(
    "dau",
    "Plain mini-batches and decoupled accumulation and update",
    "Batch normalization in a fully-connected network (A): samples per batch x batches per update.",
    "More batches per update improve batch normalization with few samples per batch significantly.",
    tuple(
        Curve(f"{samples} x {batches}", fully_connected(BATCH_NORM, samples, batches))
        for samples, batches in ((2, 1), (2, 16), (8, 1), (8, 4), (32, 1))
    ),
)
ONLINE = Figure(
    "online",
    "Online learning and tiny mini-batches",
    "A fully-connected network (A): samples per batch x batches per update. Streaming: p = 1, setting B, "
    "alpha (.7, .3), beta (.7, .3, 0).",
    "Streaming normalization works with pure online learning and tiny mini-batches, and outperforms layer norm.",
    (
        Curve("LN 32 x 1", fully_connected(LAYER_NORM, 32, 1)),
        *(
            Curve(f"{name} {samples} x {batches}", fully_connected(norm, samples, batches))
            for name, norm in (("BN", BATCH_NORM), ("streaming", STREAMING_ONLINE))
            for samples, batches in ((1, 32), (2, 16), (32, 1))
        ),
    ),
    zoom=True,
)
CONV = Figure(
    "conv",
    "References in a feedforward convolutional network",
    "Network B, 32 samples per batch. Streaming: p = 2, setting A, alpha (.5, .5), beta (.5, .5, 0).",
    "Sample normalizations all work similarly; it is better to normalize each channel separately (BA4 against BA3); "
    "neuron-wise normalization (BA6) performs very well.",
    all_references((1, 1)),
)
CONV_RNN = Figure(
    "conv-rnn",
    "References in a convolutional RNN",
    "Network C with k1 = 5, k2 = 1, settings of figure conv.",
    CONV.paper,
    all_references((5, 1)),
)
DENSE_RNN = Figure(
    "dense-rnn",
    "A densely recurrent convolutional network",
    "Network D with k = 5. TSBN 64 x 1; streaming 32 x 2: p = 2, setting B, alpha (.7, .3), beta (.7, 0, .3).",
    "Streaming normalization performs similarly to time-specific batch normalization.",
    (
        Curve("TSBN", densely_recurrent(TIME_SPECIFIC, 64, 1)),
        Curve("streaming", densely_recurrent(STREAMING_RECURRENT, 32, 2)),
    ),
)
CONV_RNN_5_5 = Figure(
    "conv-rnn-5-5",
    "A convolutional RNN, both stages unrolled",
    "Network C with k1 = k2 = 5. BN, TSBN and LN 64 x 1; streaming 32 x 2 as in figure dense-rnn.",
    "Streaming normalization clearly outperforms the others in training and converges more than twice as fast as "
    "layer norm. Batch normalization fails at test time.",
    (
        *(
            Curve(label, convolutional(norm, 64, 1, unroll=(5, 5)))
            for label, norm in (("BN", BATCH_NORM), ("TSBN", TIME_SPECIFIC), ("LN", LAYER_NORM))
        ),
        Curve("streaming", convolutional(STREAMING_RECURRENT, 32, 2, unroll=(5, 5))),
    ),
    zoom=True,
)
GRADS = Figure(
    "grads",
    "Which gradients of the statistics to use",
    "Network C with k1 = k2 = 5, streaming 32 x 2 as in figure dense-rnn, with other beta.",
    "Streaming the gradients of the statistics is very important for performance; mixtures of earlier and present "
    "gradients are best.",
    tuple(
        Curve(label, convolutional(with_beta(*beta), 32, 2, unroll=(5, 5)))
        for label, beta in (
            ("(0, 0, 0)", (0.0, 0.0, 0.0)),
            ("(0, 0, 1)", (0.0, 0.0, 1.0)),
            ("(0, 1, 0)", (0.0, 1.0, 0.0)),
            ("(1, 0, 0)", (1.0, 0.0, 0.0)),
            ("(.7, .3, 0)", (0.7, 0.3, 0.0)),
            ("(.7, 0, .3)", (0.7, 0.0, 0.3)),
        )
    ),
    zoom=True,
)
RNN = Figure(
    "rnn",
    "Characters of Shakespeare, RNN",
    "One hidden layer of 100. LN and TSBN 64 x 1; streaming 32 x 2 as in figure dense-rnn.",
    "Time-specific batch normalization and streaming converge faster than layer norm; streaming reaches slightly lower "
    "loss than both.",
    characters("rnn"),
)
GRU = Figure(
    "gru",
    "Characters of Shakespeare, GRU",
    "One hidden layer of 100. LN and TSBN 64 x 1; streaming 32 x 2 as in figure dense-rnn.",
    "Streaming converges faster than layer norm and reaches lower loss than time-specific batch normalization.",
    characters("gru"),
)
VARIANTS = Figure(
    "variants",
    "Batch and streaming forms of the references",
    "Network B, settings of figure conv. B: batch form, S: streaming form.",
    "Streaming significantly lowers training errors.",
    tuple(
        Curve(f"{ref}-{form}", convolutional(norm))
        for ref in (f"BA{i}" for i in range(1, 7))
        for form, norm in (("B", batch(ref)), ("S", streaming(ref)))
    ),
)

# Columns of Table 1, after the experiments that support them; the last one is ours. Called once in a forward pass, a
# time-specific norm is a batch norm: the same run.
FEEDFORWARD = {"BN": BATCH_NORM, "TSBN": BATCH_NORM, "LN": LAYER_NORM}
RECURRENT = {"BN": BATCH_NORM, "TSBN": TIME_SPECIFIC, "LN": LAYER_NORM}
SCENARIOS: dict[str, dict[str, Run]] = {
    "FF & FC": {
        method: fully_connected(norm, 32, 1) for method, norm in (FEEDFORWARD | {"streaming": STREAMING_ONLINE}).items()
    },
    "FF & Conv": {
        method: convolutional(norm) for method, norm in (FEEDFORWARD | {"streaming": STREAMING_CONV}).items()
    },
    "Rec & FC": {method: text("rnn", norm, 64, 1) for method, norm in RECURRENT.items()}
    | {"streaming": text("rnn", STREAMING_RECURRENT, 32, 2)},
    "Rec & Conv": {method: convolutional(norm, 64, 1, unroll=(5, 5)) for method, norm in RECURRENT.items()}
    | {"streaming": convolutional(STREAMING_RECURRENT, 32, 2, unroll=(5, 5))},
    "Online": {
        method: fully_connected(norm, 1, 32) for method, norm in (FEEDFORWARD | {"streaming": STREAMING_ONLINE}).items()
    },
    "Small batch": {
        method: fully_connected(norm, 2, 16) for method, norm in (FEEDFORWARD | {"streaming": STREAMING_ONLINE}).items()
    },
    "All combined": {
        method: convolutional(norm, 2, 16, unroll=(2, 2))
        for method, norm in (RECURRENT | {"streaming": STREAMING_RECURRENT}).items()
    },
}
TABLE = Figure(
    "table",
    "Table 1: which normalization works where",
    "Every method in every scenario. FF: feedforward, Rec: recurrent, FC: fully-connected. The settings are those of "
    "figures online, conv, rnn and conv-rnn-5-5; all combined: network C with k1 = k2 = 2, 2 x 16.",
    "The ticks and crosses of Table 1.",
    tuple(
        Curve(f"{scenario}: {method}", run)
        for scenario, methods in SCENARIOS.items()
        for method, run in methods.items()
    ),
)

FIGURES = {
    figure.name: figure
    for figure in (LP, DAU, ONLINE, CONV, CONV_RNN, DENSE_RNN, CONV_RNN_5_5, GRADS, RNN, GRU, VARIANTS, TABLE)
}
