"""Figures: files that open and do not change, lines that end where their runs ended, nothing hidden."""

import re
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from lab_results import result, results

from streamnorm.lab.errors import MissingExtra
from streamnorm.lab.figures import FIGURES
from streamnorm.lab.results import value_at
from streamnorm.lab.view.lines import best_region, ending, limits, line_of, lines_of, smoothed, without_stub
from streamnorm.lab.view.looks import looks_of

matplotlib = pytest.importorskip("matplotlib")

from streamnorm.lab.view.plot import build, draw, render  # noqa: E402


def image_run(seed=0):
    return FIGURES["online"].curves[0].run.with_seed(seed)


def line(runs, column="test_error", smooth=False):
    return line_of("curve", runs, column, 100.0, smooth)


# Lines


def test_a_line_is_the_mean_of_its_seeds_within_their_range():
    runs = [result(image_run(seed)) for seed in range(3)]
    drawn = line(runs)
    for i, (mean, low, high) in enumerate(zip(drawn.mean, drawn.low, drawn.high, strict=True)):
        values = [100 * run["curves"]["test_error"][i] for run in runs]
        assert (low, high) == (min(values), max(values))
        assert mean == pytest.approx(sum(values) / 3)


def test_seeds_of_different_length_are_met_where_both_have_values():
    long, short = result(image_run(0), rows=20), result(image_run(1), rows=7)
    drawn = line([long, short])
    assert drawn.x == long["curves"]["epoch"]
    start = short["curves"]["epoch"][0]
    for epoch, low, high in zip(drawn.x, drawn.low, drawn.high, strict=True):
        assert (low < high) == (epoch >= start)


def test_a_line_is_that_of_the_runs_that_finished():
    done, not_done = result(image_run(0)), result(image_run(1), "diverged", rows=5)
    assert line([done, not_done]).mean == line([done]).mean
    assert line([done, not_done]).text == "curve: 1 of 2 diverged"


def test_a_diverged_line_ends_at_its_last_value():
    drawn = line([result(image_run(), "diverged", rows=5)])
    assert len(drawn.x) == 4
    assert not drawn.finished


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (["finished", "finished"], ""),
        (["refused", "refused"], "cannot run"),
        (["diverged"], "diverged"),
        (["finished", "diverged", "refused"], "1 of 3 diverged, 1 of 3 cannot run"),
        ([], "no results"),
    ],
)
def test_endings(outcomes, words):
    assert ending([result(image_run(), outcome) for outcome in outcomes]) == words


def test_smoothing_keeps_lines_straight_and_ends_in_place():
    straight = [(float(i), 3.0 * i) for i in range(100)]
    assert [value for _, value in smoothed(straight, 9)] == pytest.approx([value for _, value in straight])
    few = [(0.0, 1.0), (1.0, 5.0), (2.0, 3.0)]
    assert smoothed(few, 1) == few
    assert smoothed(few, 3) == [(0.0, 1.0), (1.0, 3.0), (2.0, 3.0)]


def test_a_last_row_of_a_few_updates_is_not_drawn():
    rows = [(1.0, 3.0), (2.0, 1.0), (2.2, 9.0)]
    assert without_stub(rows) == rows[:2]
    assert without_stub([*rows[:2], (2.8, 9.0)]) == [*rows[:2], (2.8, 9.0)]
    assert without_stub(rows[:2]) == rows[:2]


def test_values_between_rows():
    points = [(1.0, 10.0), (2.0, 20.0)]
    assert [value_at(points, x) for x in (0.5, 1.0, 1.25, 2.0, 2.5)] == [None, 10.0, 12.5, 20.0, None]


def test_limits_and_enlargement_ignore_what_runs_away():
    lines = lines_of(results("online"), "test_error")
    wild = replace(lines[0], finished=False, mean=[1e9] * 20, low=[1e9] * 20, high=[1e9] * 20)
    assert limits([*lines[1:], wild], 90.0)[1] < 110
    assert best_region([*lines[1:], wild]) == best_region(lines[1:])
    assert best_region([wild]) is None


# Looks


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_no_two_curves_look_alike_even_without_colour(figure):
    if figure.name != "table":
        looks = looks_of(curve.label for curve in figure.curves)
        for one, other in combinations(looks.values(), 2):
            assert (one.dashes, one.marker, one.hollow) != (other.dashes, other.marker, other.hollow)
            assert (one.colour, one.dashes) != (other.colour, other.dashes)


def test_forms_of_a_reference_share_its_colour():
    looks = looks_of(curve.label for curve in FIGURES["variants"].curves)
    assert looks["BA4-B"].colour == looks["BA4-S"].colour == looks_of(["BA3", "BA4"])["BA4"].colour
    assert looks["BA4-B"].dashes
    assert not looks["BA4-S"].dashes


# Drawings


@pytest.mark.parametrize(("name", "panels"), [("lp", 2), ("online", 4), ("rnn", 2), ("table", 1)])
def test_panels(name, panels):
    assert len(build(results(name)).axes) == panels


def test_bands_only_with_several_seeds():
    bands = [len(build(results("lp", seeds=seeds)).axes[0].collections) for seeds in (1, 2)]
    assert bands == [0, 5]


def test_text_is_drawn_as_loss_and_images_as_error():
    labels = [build(results(name)).axes[1].get_ylabel() for name in ("rnn", "lp")]
    assert labels == ["loss (nats)", "error (%)"]


@pytest.mark.parametrize("name", ["online", "table"])
def test_files_are_what_they_should_be_and_never_change(name, tmp_path):
    found = results(name, seeds=2)
    paths = draw(found, tmp_path)
    assert [path.name for path in paths] == [f"{found.file_name}.png", f"{found.file_name}.svg"]
    png, svg = (path.read_bytes() for path in paths)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert svg.startswith(b"<?xml")
    assert b"<svg" in svg
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False}):
        assert [path.read_bytes() for path in draw(found, tmp_path)] == [png, svg]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_matrix_is_light_at_the_best_and_dark_at_guessing():
    figure = FIGURES["table"]
    curves = {curve.label: [result(curve.run)] for curve in figure.curves}
    for label, error in (("Online: BN", 0.2), ("Online: TSBN", 0.5), ("Online: LN", 0.9), ("Online: streaming", 0.95)):
        curves[label][0]["curves"]["test_error"][-1] = error
    cells = build(replace(results("table"), curves=curves)).axes[0].patches[16:20]
    light, middle, *dark = [sum(cell.get_facecolor()[:3]) for cell in cells]
    assert light > middle > dark[0] == dark[1]


def test_runs_that_did_not_end_are_named():
    outcomes = {"BN 1 x 32": ["refused"] * 2, "BN 2 x 16": ["diverged"] * 2, "LN 32 x 1": ["finished", "diverged"]}
    svg = render(results("online", seeds=2, outcomes=outcomes), "svg").decode()
    texts = re.findall(r"<text[^>]*>([^<]*)<", svg)
    for words in ("BN 1 x 32: cannot run", "BN 2 x 16: diverged", "LN 32 x 1: 1 of 2 diverged", "streaming 1 x 32"):
        assert any(words in text for text in texts)


def test_the_legend_is_of_what_is_drawn_and_no_line_is_heavier():
    drawing = build(results("online", outcomes={"BN 1 x 32": ["refused"]}))
    (legend,) = drawing.legends
    shown = [text.get_text() for text in legend.get_texts()]
    lines = drawing.axes[0].lines
    assert len(shown) == sum(bool(len(each.get_xdata())) for each in lines) == len(FIGURES["online"].curves) - 1
    assert "not drawn: BN 1 x 32: cannot run" in legend.get_title().get_text()
    assert len({(each.get_linewidth(), each.get_zorder()) for each in lines}) == 1


@pytest.mark.parametrize("name", ["online", "rnn", "table"])
@pytest.mark.parametrize("outcome", ["finished", "refused", "diverged"])
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_or_none(name, outcome, rows):
    outcomes = {curve.label: [outcome] for curve in FIGURES[name].curves}
    assert render(results(name, outcomes=outcomes, rows=rows), "png")


@pytest.mark.parametrize("name", ["online", "table"])
@pytest.mark.parametrize("curves", [{}, {"a": []}, {"a: b": []}])
def test_curves_without_runs(name, curves):
    assert render(replace(results(name), curves=curves), "svg")


@pytest.mark.parametrize("label", ["$x", "$\\frac{$", "<b> & \"'", "x" * 200, "\N{SNOWMAN}", ""])
def test_labels_are_text_whatever_they_are(label):
    found = results("lp")
    svg = render(replace(found, curves={label: found.curves["p = 1"]}), "svg").decode()
    assert "<b>" not in svg


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install .streamnorm\[lab\]"):
        render(results("lp"), "png")
