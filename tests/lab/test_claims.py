"""Claims: the rule, and what each of them measures."""

import math
import random
from dataclasses import replace

import pytest
from lab_results import results

from streamnorm.lab import measures
from streamnorm.lab.claims import CLAIMS, NOT_RUN, OPEN, REPRODUCED, REVERSED, TABLE, judge, outcome
from streamnorm.lab.figures import FIGURES, SCENARIOS
from streamnorm.lab.results import final, points


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.1, 0.9], REPRODUCED),
        ([-1.0, -1.1, -0.9], REVERSED),
        ([1.0, 1.1, -0.01], OPEN),  # one seed has the other sign
        ([0.1, 0.1, 5.0], OPEN),  # every sign right, but no more than two standard errors
        ([1.0], OPEN),  # one seed
        ([], OPEN),
        ([0.0, 0.0, 0.0], OPEN),
        ([0.5, 0.5, 0.5], REPRODUCED),  # no spread at all
    ],
)
def test_the_rule(values, expected):
    assert outcome(values) == expected


def with_ends(name, ends, scale="quick", **fields):
    """Results of a figure in which each curve ends at the given value of every measure, for each of its seeds."""
    made = results(name, seeds=3)
    curves = {}
    for label, runs in made.curves.items():
        curves[label] = []
        for seed, run in enumerate(runs):
            value = ends.get(label, [0.5] * 3)[seed]
            columns = {key: list(column) for key, column in run["curves"].items()}
            for key in columns:
                if key.startswith(("train_", "test_")):
                    columns[key][-3:] = [value] * 3  # final losses are means over the last tenth
            curves[label].append({**run, "curves": columns})
    return replace(made, curves=curves, scale=scale, **fields)


def verdict(found, name):
    return next(claim for claim in judge(found) if claim.name == name)


def test_a_claim_of_two_curves_by_hand():
    name = "online: streaming 1 x 32 < LN 32 x 1, test error"
    ours, theirs = "streaming 1 x 32", "LN 32 x 1"
    good = verdict(with_ends("online", {ours: [0.50, 0.51, 0.52], theirs: [0.60, 0.60, 0.64]}), name)
    assert good.outcome == REPRODUCED
    assert good.values == pytest.approx([10, 9, 12])  # points
    assert good.mean == pytest.approx(31 / 3)
    assert good.error == pytest.approx((((10 - 31 / 3) ** 2 + (9 - 31 / 3) ** 2 + (12 - 31 / 3) ** 2) / 2 / 3) ** 0.5)
    assert verdict(with_ends("online", {ours: [0.6, 0.6, 0.61], theirs: [0.5, 0.5, 0.5]}), name).outcome == REVERSED
    assert verdict(with_ends("online", {ours: [0.6, 0.5, 0.6], theirs: [0.5, 0.6, 0.5]}), name).outcome == OPEN


def test_a_smoke_run_is_no_evidence():
    name = "online: streaming 1 x 32 < LN 32 x 1, test error"
    ends = {"streaming 1 x 32": [0.1] * 3, "LN 32 x 1": [0.8, 0.8, 0.81]}
    assert verdict(with_ends("online", ends), name).outcome == REPRODUCED
    assert verdict(with_ends("online", ends, scale="smoke"), name).outcome == OPEN


def test_what_cannot_run_counts_as_guessing():
    found = results("online", seeds=3, outcomes={"BN 1 x 32": ["refused"] * 3})
    assert measures.end(found, "BN 1 x 32", 0, "test_error") == pytest.approx(90)
    found = results("rnn", seeds=3, outcomes={"LN": ["finished", "diverged", "finished"]})
    assert all(claim.outcome in (OPEN, REPRODUCED, REVERSED) for claim in judge(found))


def test_the_final_training_loss_is_a_mean_over_the_same_span_in_every_curve():
    """The last tenth of ten epochs is the last one, wherever the rows lie."""
    run = results("dau", seeds=1).curves["8 x 1"][0]
    run["curves"] = {"update": [1, 2, 3], "epoch": [5, 9, 10], "train_loss": [3.0, 2.0, 1.0], "test_loss": [3, 2, 1]}
    assert final(run, "train_loss") == pytest.approx(1.0)
    assert final(run, "test_loss") == 1
    run["curves"]["epoch"] = [5, 9.5, 10]  # half of that epoch is in the row before
    assert final(run, "train_loss") == pytest.approx(1.5)
    run["curves"]["epoch"] = [5, 8, 10]
    assert final(run, "train_loss") == pytest.approx(1.0)
    run["curves"]["train_loss"][-1] = None
    assert final(run, "train_loss") == pytest.approx(2.0)
    assert points(run, "absent") == []


def test_similar_means_within_three_points():
    ends = {f"p = {p}": [0.50, 0.51, 0.50] for p in (1, 2, 3, 5, 7)}
    assert verdict(with_ends("lp", ends), "lp: similar").outcome == REPRODUCED
    ends["p = 3"] = [0.55, 0.56, 0.56]
    assert verdict(with_ends("lp", ends), "lp: similar").outcome == REVERSED
    ends["p = 3"], ends["p = 7"] = ends["p = 1"], [0.6, 0.6, 0.61]  # of 7 another claim speaks
    assert verdict(with_ends("lp", ends), "lp: similar").outcome == REPRODUCED
    assert verdict(with_ends("lp", ends), "lp: 7 worse").outcome == REPRODUCED


@pytest.mark.parametrize(("share", "expected"), [(0.1, REPRODUCED), (0.9, REVERSED), (2.0, REVERSED)])
def test_twice_as_fast_counts_updates(share, expected):
    """`share`: when streaming reaches the end of LN; 2: never."""
    found = results("conv-rnn-5-5", seeds=3)
    for label, runs in found.curves.items():
        for run in runs:
            updates = run["curves"]["update"]
            level = {"LN": 1.0, "streaming": 0.9}.get(label, 1.5)
            reached = share * updates[-1] if label == "streaming" else 0
            run["curves"]["train_loss"] = [level if update >= reached else 2.0 for update in updates]
    assert verdict(found, "conv-rnn-5-5: twice as fast as LN").outcome == expected


def test_faster_looks_at_the_first_half():
    found = results("gru", seeds=3)
    for label, runs in found.curves.items():
        for run in runs:
            epochs = run["curves"]["epoch"]
            early = {"streaming": 1.5}.get(label, 2.0)
            run["curves"]["test_loss"] = [early if epoch <= 1.5 else 9.0 - early for epoch in epochs]
    claim = verdict(found, "gru: streaming faster than LN")
    assert claim.values == pytest.approx([0.5] * 3)
    assert claim.outcome == REPRODUCED


def test_faster_compares_at_the_same_epochs():
    """The same curve, with rows twice as often in one run: no difference, in spite of the steep start."""
    found = results("gru", seeds=3)
    for label, runs in found.curves.items():
        for run in runs:
            rows = 60 if label == "streaming" else 30
            epochs = [3 * (i + 1) / rows for i in range(rows)]
            losses = [2 + 2.4 * math.exp(-20 * epoch) for epoch in epochs]
            run["curves"] = {"update": list(range(rows)), "epoch": epochs, "train_loss": losses, "test_loss": losses}
    assert verdict(found, "gru: streaming faster than LN").values == pytest.approx([0.0] * 3, abs=1e-12)


def test_a_claim_about_a_curve_that_is_not_there_was_not_run():
    found = results("online", seeds=3)
    del found.curves["BN 2 x 16"]
    claim = verdict(found, "online: streaming 2 x 16 < BN 2 x 16, test error")
    assert (claim.outcome, claim.values) == (NOT_RUN, [])


def test_methods_that_are_one_run_are_no_rivals():
    """Without recurrence time-specific batch norm is batch norm: if it is the best, it is not worse than the best."""
    ends = {"BN": 0.40, "TSBN": 0.40, "LN": 0.50, "streaming": 0.55}
    found = with_ends("table", {f"Small batch: {method}": [end] * 3 for method, end in ends.items()})
    assert verdict(found, "table: Small batch, BN").outcome == REVERSED


def test_the_cells_of_table_1():
    """Ticks, crosses and stars, with one scenario's ends given by hand."""
    ends = {f"FF & Conv: {method}": [end] * 3 for method, end in
            {"BN": 0.30, "TSBN": 0.30, "LN": 0.33, "streaming": 0.31}.items()}  # fmt: skip
    found = with_ends("table", ends)
    assert verdict(found, "table: FF & Conv, streaming").values == pytest.approx([4.0] * 3)  # 5 points less 1
    assert verdict(found, "table: FF & Conv, BN").values == pytest.approx(
        [6.0] * 3
    )  # better than the best of its rivals
    assert verdict(found, "table: FF & Conv, LN").values == pytest.approx([3.0] * 3)  # worse than the best
    crossed = with_ends("table", {"Rec & Conv: BN": [0.8] * 3, "Rec & Conv: TSBN": [0.4] * 3})
    assert verdict(crossed, "table: Rec & Conv, BN").outcome == REPRODUCED
    assert all(len(marks.split()) == len(SCENARIOS) == 7 for marks in TABLE.values())
    assert len([claim for claim in CLAIMS if claim.figure == "table"]) == 28


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_claims_that_can_be_computed(name):
    found = judge(results(name, seeds=3))
    assert found
    assert all(len(claim.values) == 3 for claim in found)
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_claim_can_be_won_and_lost(claim):
    """There are results for which it holds, and results for which it does not: among a few hundred random ones."""
    draw = random.Random(0)
    signs = set()
    for _ in range(300):
        ends = {curve.label: [draw.choice([0.3, 0.31, 0.5, 0.9])] * 3 for curve in FIGURES[claim.figure].curves}
        found = with_ends(claim.figure, ends)
        signs.add(claim.measure(found, 0) > 0)
        if len(signs) == 2:
            return
    assert "fast" in claim.name  # these look at the course, and are tested above
