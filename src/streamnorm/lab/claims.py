"""The paper's claims as computed tests.

A claim gives one number per seed that is positive where the claim holds. It is *reproduced* if every seed is positive
and the mean is more than two standard errors above zero, *not reproduced* if it is reversed (every seed negative, the
mean more than two standard errors below), and otherwise there is *not enough evidence*. Seeds are paired: a seed means
the same first weights in every curve, and of images the same order, so the error is that of the differences. A run
that cannot run or whose loss ends in NaN counts as guessing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .figures import SCENARIOS
from .measures import Measure, alike, best_lower, course_lower, lower, near_best, negated, reached_within
from .results import FigureResults, mean_and_error
from .scales import SMOKE

REPRODUCED, REVERSED, OPEN = "reproduced", "not reproduced", "not enough evidence"
NOT_RUN = "not run"
# What counts as "similar" and as "works well": points of error, and nats, behind the best.
SIMILAR = 3.0
WORKS = {"test_error": 5.0, "test_loss": 0.05}
UNITS = {"error": "points", "loss": "nats"}


@dataclass(frozen=True)
class Claim:
    figure: str
    name: str
    text: str
    paper: str  # where the paper says so
    measure: Measure
    unit: str


@dataclass(frozen=True)
class Verdict:
    """A claim, judged by results."""

    figure: str
    name: str
    text: str
    paper: str
    outcome: str
    values: list[float]  # one per seed, positive = as claimed
    mean: float
    error: float  # standard error of the mean
    unit: str
    scale: str
    file_name: str
    late: bool = False  # see FigureResults

    @property
    def protocol(self) -> str:
        """To be put behind the scale: what is not as in the paper."""
        return ", tested after updates" * self.late


def judge(results: FigureResults) -> list[Verdict]:
    """Every claim about a figure, computed from its results."""
    return [_judge(claim, results) for claim in CLAIMS if claim.figure == results.figure.name]


def judge_all(found: Sequence[FigureResults]) -> list[Verdict]:
    """All claims by all results that were not varied, in the order of the claims; those that none of them judges too.

    A claim may be judged several times: at several scales, on several data.
    """
    verdicts = {results.file_name: judge(results) for results in found if not results.variation}
    judged: list[Verdict] = []
    for claim in CLAIMS:
        own = [each for several in verdicts.values() for each in several if each.name == claim.name and each.values]
        judged += own or [Verdict(*_told(claim), NOT_RUN, [], math.nan, math.nan, claim.unit, "", "")]
    return judged


def _told(claim: Claim) -> tuple[str, str, str, str]:
    return claim.figure, claim.name, claim.text, claim.paper


def _judge(claim: Claim, results: FigureResults) -> Verdict:
    try:
        values = [claim.measure(results, seed) for seed in results.seeds]
    except KeyError:  # a figure that was changed: not all of the claim's curves are there
        values = []
    mean, error = mean_and_error(values)
    found = OPEN if results.scale == SMOKE.name else outcome(values)  # a handful of updates says nothing
    found = found if values else NOT_RUN
    where = (results.scale, results.file_name, results.late)
    return Verdict(*_told(claim), found, values, mean, error, claim.unit, *where)


def outcome(values: Sequence[float]) -> str:
    """The rule at the head of this file. One seed, or none, is never enough."""
    if len(values) < 2:
        return OPEN
    mean, error = mean_and_error(values)
    if all(value > 0 for value in values) and mean > 2 * error:
        return REPRODUCED
    if all(value < 0 for value in values) and mean < -2 * error:
        return REVERSED
    return OPEN


# The claims


def pair(figure: str, ours: str, theirs: str, name: str, paper: str) -> Claim:
    """`ours` ends lower than `theirs`."""
    kind, what = name.split("_")
    words = {"train": "training", "test": "test"}[kind]
    slug = f"{figure}: {ours} < {theirs}, {words} {what}"
    return Claim(
        figure, slug, f"{ours} ends with a lower {words} {what} than {theirs}", paper,
        lower(name, [ours], [theirs]), UNITS[what],
    )  # fmt: skip


PS = ["p = 1", "p = 2", "p = 3", "p = 5"]
SPS = ["SP1 (LN)", "SP2", "SP3", "SP4", "SP5"]
EACH, ALL = ["BA1 (BN)", "BA4", "BA6"], ["BA2", "BA3", "BA5"]
ERRORS = UNITS["error"]


def _lp() -> list[Claim]:
    return [
        Claim("lp", "lp: similar", "p = 1, 2, 3 and 5 end within 3 points of test error of each other",
              "figure Lp: all moments perform similarly well", alike("test_error", PS, SIMILAR), ERRORS),
        Claim("lp", "lp: L1 as good as L2", "p = 1 ends at most 3 points of test error above p = 2",
              "section on Lp: L1 works as well as L2", near_best("test_error", "p = 1", ["p = 2"], SIMILAR), ERRORS),
        Claim("lp", "lp: 7 worse", "p = 7 ends with a higher training loss than the mean of the others",
              "figure Lp: L7 is slightly worse", lower("train_loss", PS, ["p = 7"]), "nats"),
    ]  # fmt: skip


def _dau() -> list[Claim]:
    paper = "figure DAU: significantly improves batch norm with few samples per batch"
    pairs = (("2 x 1", "2 x 16"), ("8 x 1", "8 x 4"))
    return [pair("dau", many, few, name, paper) for few, many in pairs for name in ("train_loss", "test_error")] + [
        pair("dau", "32 x 1", "2 x 16", "train_loss", "figure DAU: small batches are rescued in part")
    ]


def _online() -> list[Claim]:
    paper = "figure online: works with 1 and 2 samples per batch and outperforms layer norm"
    sizes = ["1 x 32", "2 x 16", "32 x 1"]
    return [
        pair("online", f"streaming {size}", "LN 32 x 1", name, paper)
        for size in sizes
        for name in ("train_loss", "test_error")
    ] + [
        pair("online", f"streaming {size}", f"BN {size}", "test_error", f"table 1: batch norm {word}")
        for size, word in (("1 x 32", "fails online"), ("2 x 16", "is suboptimal with small batches"))
    ]


def _references(figure: str) -> list[Claim]:
    each = [*EACH, *ALL]
    return [
        Claim(figure, f"{figure}: samples alike", "SP1-SP5 end within 3 points of test error of each other",
              "figures conv: sample normalizations all work similarly", alike("test_error", SPS, SIMILAR), ERRORS),
        pair(figure, "BA4", "BA3", "train_loss", "figures conv: beneficial to normalize each channel separately"),
        pair(figure, "BA4", "BA3", "test_error", "figures conv: beneficial to normalize each channel separately"),
        Claim(figure, f"{figure}: each channel", "BA1, BA4, BA6 end with a lower mean training loss than BA2, BA3, BA5",
              "figures conv: beneficial to normalize each channel separately", lower("train_loss", EACH, ALL), "nats"),
        Claim(figure, f"{figure}: BA6 very good", "BA6 ends at most 3 points of test error above the best of BA1-BA6",
              "discussion: neuron-wise normalization performs very well", near_best("test_error", "BA6", each, SIMILAR),
              ERRORS),
    ]  # fmt: skip


def _conv_rnn_5_5() -> list[Claim]:
    figure, paper = "conv-rnn-5-5", "figure C 5-5: streaming clearly outperforms other methods in training"
    return [pair(figure, "streaming", other, "train_loss", paper) for other in ("BN", "TSBN", "LN")] + [
        Claim(figure, f"{figure}: twice as fast as LN",
              "streaming reaches LN's final training loss in less than half of the updates",
              "figure C 5-5: converges more than twice as fast as layer norm",
              reached_within(0.5, "train_loss", "streaming", "LN"), "share of updates"),
        Claim(figure, f"{figure}: BN fails at test", "BN ends more than 10 points of test error above TSBN",
              "figure C 5-5: original BN fails on testing",
              negated(near_best("test_error", "BN", ["TSBN"], 10.0)), ERRORS),
    ]  # fmt: skip


def _grads() -> list[Claim]:
    mixtures, singles = ["(.7, .3, 0)", "(.7, 0, .3)"], ["(0, 0, 1)", "(0, 1, 0)", "(1, 0, 0)"]
    return [
        Claim("grads", "grads: streaming matters", "(1, 0, 0) and the mixtures end with a lower mean training loss "
              "than (0, 0, 0) and (0, 0, 1)", "figure grads: streaming the gradients is very important",
              lower("train_loss", ["(1, 0, 0)", *mixtures], ["(0, 0, 0)", "(0, 0, 1)"]), "nats"),
        Claim("grads", "grads: mixtures best", "the better mixture ends with a lower training loss than any other beta",
              "figure grads: some combinations seem to give the best performances",
              best_lower("train_loss", mixtures, ["(0, 0, 0)", *singles]), "nats"),
        pair("grads", "(1, 0, 0)", "(0, 0, 0)", "train_loss", "figure grads: (1, 0, 0) works reasonably well"),
    ]  # fmt: skip


def _faster(figure: str, ours: str) -> Claim:
    return Claim(
        figure, f"{figure}: {ours} faster than LN",
        f"over the first half of the training, {ours} has a lower mean validation loss than LN",
        f"figure {figure}: converges faster than layer norm", course_lower("test_loss", ours, "LN"), "nats",
    )  # fmt: skip


def _text() -> list[Claim]:
    lower_loss = "figure rnn: streaming reaches slightly lower loss than TSBN and LN"
    return [
        _faster("rnn", "TSBN"),
        _faster("rnn", "streaming"),
        pair("rnn", "streaming", "LN", "test_loss", lower_loss),
        pair("rnn", "streaming", "TSBN", "test_loss", lower_loss),
        _faster("gru", "streaming"),
        pair("gru", "streaming", "TSBN", "test_loss", "figure gru: streaming reaches lower loss than TSBN"),
    ]


def _variants() -> list[Claim]:
    paper = "figure variants: streaming significantly lowers training errors"
    return [pair("variants", f"BA{i}-S", f"BA{i}-B", "train_error", paper) for i in range(1, 7)]


# Table 1. "+": works well; "-": does not work well; "*": significantly worse than the best; "~": limited, works at the
# trained length but keeps statistics for every timestep.
TABLE = {
    "BN": "+ + - - - * -",
    "TSBN": "+ + ~ ~ - * -",
    "LN": "+ * + * + + *",
    "streaming": "+ + + + + + +",
}
WORDS = {
    "+": "works well: it ends at most {margin} above the best",
    "~": "works at the trained length: it ends at most {margin} above the best",
    "-": "does not work well: it ends more than {margin} above the best",
    "*": "is worse than the best",
}


def _table() -> list[Claim]:
    return [
        _cell(method, scenario, mark)
        for method, marks in TABLE.items()
        for scenario, mark in zip(SCENARIOS, marks.split(), strict=True)
    ]


def _cell(method: str, scenario: str, mark: str) -> Claim:
    """One tick or cross."""
    text = SCENARIOS[scenario][method].is_text
    name = "test_loss" if text else "test_error"
    margin = 0.0 if mark == "*" else WORKS[name]
    # A method that is the same run, as time-specific batch norm without recurrence, is no rival.
    runs = SCENARIOS[scenario]
    rivals = [f"{scenario}: {other}" for other in runs if runs[other] != runs[method]]
    measure = near_best(name, f"{scenario}: {method}", rivals, margin)
    words = WORDS[mark].format(margin="0.05 nats" if text else "5 points of test error")
    return Claim(
        "table", f"table: {scenario}, {method}", f"{scenario}: {method} {words}", "table 1",
        measure if mark in "+~" else negated(measure), UNITS[name.split("_")[1]],
    )  # fmt: skip


CLAIMS: list[Claim] = [
    *_lp(),
    *_dau(),
    *_online(),
    *_references("conv"),
    *_references("conv-rnn"),
    Claim("dense-rnn", "dense-rnn: similar", "streaming and TSBN end within 3 points of test error of each other",
          "figure D: similar performance to TSBN", alike("test_error", ["TSBN", "streaming"], SIMILAR), ERRORS),
    *_conv_rnn_5_5(),
    *_grads(),
    *_text(),
    *_variants(),
    *_table(),
]  # fmt: skip
