"""Online learning, measured: the grid and its runs, the command, the numbers of a cell, the goals, the page."""

import json
import math
import shlex
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev

import pytest
import torch
import torch.nn.functional as F
from lab_results import assert_refused, contents

from streamnorm import StreamingNorm
from streamnorm.core.algorithm import ALIKE, FULL
from streamnorm.lab.cli import main, rates
from streamnorm.lab.commands import _rates
from streamnorm.lab.errors import LabError, StoreError
from streamnorm.lab.goals import at_an_end, goals, tally
from streamnorm.lab.grid import (
    BATCHES,
    CONV_RATES,
    DEFAULT,
    NETS,
    NORMS,
    OURS,
    RATES,
    RIVALS,
    SAMPLES,
    Grid,
    Place,
    is_convolutional,
    norms_of,
    places,
)
from streamnorm.lab.models import build, make_norm
from streamnorm.lab.online import Online, Trained, read_online
from streamnorm.lab.results import read_folder
from streamnorm.lab.runs import Norm
from streamnorm.lab.scales import SCALES, scaled
from streamnorm.lab.variations import varied
from streamnorm.lab.view.cells import fill, filled, heading, markdown, table, verdicts

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs/measured/online.md", ROOT / "docs/results"
WILD = 1e9  # a learning rate that nothing survives
TINY = ["bench-online", "--net", "fully-connected", "--data", "digits", "--size", "256", "--seeds", "2"]
TINY += ["--samples", "2", "--batches", "1,128", "--rates", f"0.01,{WILD}"]
NAME = "online-fully-connected-digits"
KINDS = ("json", "png", "svg")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a small grid, really trained."""
    out = tmp_path_factory.mktemp("measured")
    assert main([*TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(measured, tmp_path):
    return Path(shutil.copytree(measured, tmp_path / "out"))


def read(folder):
    return read_online(folder / f"{NAME}.json")


# Networks and norms


def test_the_net_of_rows_is_an_rnn_over_strips_of_the_image():
    net = build(Place("recurrent", "none", 1, 1).run(0.01, 0, 64))
    weights = dict(net.recurrent.named_parameters())
    x = torch.randn(5, 3, 32, 32)
    h = torch.zeros(5, 128)
    for top in range(0, 32, 4):
        strip = x[:, :, top : top + 4].reshape(5, -1)
        h = torch.tanh(
            strip @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
            + h @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
        )  # fmt: skip
    assert torch.allclose(net(x), net.head(h), atol=1e-5)


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "group norm"])
def test_the_net_of_rows_normalizes_both_products(norm):
    net = build(Place("recurrent", norm, 2, 1).run(0.01, 0, 64))
    net(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    kinds = {type(layer).__name__ for layer in net.modules()} & {"StreamingNorm", "SampleNorm", "GeneralBatchNorm"}
    assert len(kinds) == (norm != "none")


def test_group_norm_is_that_of_torch_and_none_is_nothing():
    x = torch.randn(3, 8, 5, 5)
    group, none = (make_norm(Norm(kind), 8, 1) for kind in ("group", "none"))
    assert torch.allclose(group(x, step=3), F.group_norm(x, 4), atol=1e-6)
    assert none(x, step=3) is x
    assert not list(none.parameters())
    with pytest.raises(ValueError, match=r"kind .no.: must be .* group or none"):
        make_norm(Norm("no"), 8, 1)


# The grid


@pytest.mark.parametrize("net", NETS)
def test_places(net):
    found = list(places(net))
    assert len(set(found)) == len(found)
    convolutional = net.startswith("convolutional")
    assert ("group norm" in norms_of(net), "layer norm" in norms_of(net)) == (convolutional, not convolutional)
    alone = [place for place in found if place.norm == "batch norm" and place.samples == 1]
    assert len(alone) == (len(BATCHES) if convolutional else 0)
    assert len(found) == 7 * len(SAMPLES) * len(BATCHES) - (0 if convolutional else len(BATCHES))


def test_the_default_is_that_of_the_library():
    assert make_norm(DEFAULT, 3, 1).config == StreamingNorm(3).config


def test_with_and_without_guard_is_one_run_where_nothing_is_guarded_or_averaged():
    """A full window, and if it is of images, in one call: a batch, at one timestep."""
    for net in NETS:
        for samples in SAMPLES:
            for batches in BATCHES:
                one, two = (Place(net, norm, samples, batches) for norm in ("streaming", "streaming, guard=False"))
                once = batches == 1 and net != "convolutional-recurrent"
                elements = samples * batches * (ALIKE if is_convolutional(net) else 1)
                alike = elements >= FULL and samples * batches >= 20 and (once or not is_convolutional(net))
                assert (one.run(0.01, 0, 64) == two.run(0.01, 0, 64)) == alike


def test_rates_grow_with_the_root_of_the_samples_per_update():
    assert Place("recurrent", "none", 8, 2).run(0.003, 0, 64).rates == ((0.012, 1),)


def test_own_rates_or_others():
    assert [rates(text) for text in ("3", "0.01", "0.1,0.01,1e-3")] == [3, (0.01,), (0.001, 0.01, 0.1)]
    assert _rates("recurrent", None) == RATES
    assert _rates("convolutional", None) == CONV_RATES
    assert [_rates("recurrent", n) for n in (1, 3, 5)] == [RATES[2:3], RATES[1:4], RATES]
    with pytest.raises(LabError, match="--rates 4: convolutional has 3 of its own; list others"):
        _rates("convolutional", 4)


def test_a_grid_names_the_command_that_measures_it():
    usual = Grid("convolutional", SAMPLES, BATCHES, CONV_RATES, 3, 4000, "cifar10")
    assert usual.command == "streamnorm bench-online --net convolutional"
    other = replace(usual, samples=(1, 2, 32), rates=(0.5,), seeds=1, size=64, data="digits")
    options = "--samples 1,2,32 --rates 0.5 --size 64 --seeds 1 --data digits"
    assert other.command == f"{usual.command} {options}"


def test_the_addresses_of_older_results_have_not_changed():
    """A setting that came later is left out of them where it is off: what was trained before is found again.

    What was tested after updates at first is found by that variation.
    """
    found = read_folder(RESULTS)
    assert len(found) >= 6
    for each in found:
        for label, results in each.curves.items():
            variation = each.variation | ({"test": "after"} if each.late else {})
            run = varied(scaled(each.figure[label], SCALES[each.scale]), variation)
            for result in results:
                assert run.with_seed(result["settings"]["seed"]).address(result["data"]) == result["id"], label


# The command


def test_every_distinct_run_is_trained_once(measured):
    found = read(measured)
    assert len(found.runs) == found.planned == (7 + 5) * 2 * 2
    assert {run.id for run in found.runs} == {path.name for path in (measured / "runs").iterdir()}
    shared = {run.batches for run in found.runs if len(run.norms) > 1}
    assert shared == {128}  # 2 x 128 fills the window, 2 x 1 does not
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert (measured / f"{NAME}{suffix}").read_bytes().startswith(start)


def test_the_file_is_small_and_read_back_as_it_was(measured, tmp_path):
    found = read(measured)
    path = found.write(tmp_path)
    assert path.read_bytes() == (measured / f"{NAME}.json").read_bytes()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines if line.startswith("[[")) < 120
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["settings"]["train_size"] == 256
    assert content["settings"]["norms"]["streaming"]["guard"]
    assert content["versions"][0]["torch"] == torch.__version__


def test_a_cell_is_computed_from_the_runs(measured):
    found = read(measured)
    calm = [run for run in found.of("layer norm", 2, 1) if run.rate == 0.01]
    results = [json.loads((measured / "runs" / run.id / "result.json").read_text(encoding="utf-8")) for run in calm]
    assert [result["settings"]["rates"][0][0] for result in results] == [0.014] * 2
    accuracies = [100 * (1 - result["curves"]["test_error"][-1]) for result in results]
    cell = found.cell("layer norm", 2, 1)
    assert cell.chosen_by[0.01] == fmean(100 * (1 - result["curves"]["valid_error"][-1]) for result in results)
    assert cell.rate == 0.01
    assert cell.best == (fmean(accuracies), stdev(accuracies) / math.sqrt(2))
    assert cell.median == (cell.best[0] + 10) / 2  # the other rate is as good as guessing


def test_divergence_is_counted(measured):
    found = read(measured)
    for norm in norms_of("fully-connected"):
        diverged = found.cell(norm, 2, 1).diverged
        assert diverged[WILD] == 2, norm
        # Running estimates of batches of two are off by any factor, another one on each machine.
        assert diverged[0.01] == 0 or norm == "batch norm", norm
        assert found.cell(norm, 2, 1).means[WILD] == pytest.approx((10, 0))
    outcomes = {run.outcome for run in found.runs if run.rate == WILD}
    assert outcomes == {"finished", "diverged"}  # a loss that is finite and absurd is no better than none


def test_what_was_trained_is_not_trained_again(copied, capsys):
    before = {path: path.stat().st_mtime_ns for path in copied.glob("runs/*/result.json")}
    content = (copied / f"{NAME}.json").read_bytes()
    assert main([*TINY, "--out", str(copied)]) == 0
    assert {path: path.stat().st_mtime_ns for path in copied.glob("runs/*/result.json")} == before
    assert (copied / f"{NAME}.json").read_bytes() == content
    output = capsys.readouterr()
    assert "to train" not in output.err
    assert table(read(copied)) in output.out
    assert verdicts(read(copied)) in output.out

    shutil.rmtree(copied / "runs")  # what the file tells of is enough
    assert main([*TINY, "--out", str(copied)]) == 0
    assert (copied / f"{NAME}.json").read_bytes() == content
    assert "to train" not in capsys.readouterr().err

    found = read(copied)
    lost = found.of("layer norm", 2, 1)[0]
    replace(found, runs=[run for run in found.runs if run.id != lost.id]).write(copied)
    assert main([*TINY, "--out", str(copied)]) == 0
    assert "1 runs to train, 0 done before" in capsys.readouterr().err
    again = read(copied).of("layer norm", 2, 1)[0]
    assert replace(again, seconds=0, test_loss=0, train_loss=0) == replace(lost, seconds=0, test_loss=0, train_loss=0)
    assert (again.test_loss, again.train_loss) == pytest.approx((lost.test_loss, lost.train_loss), rel=1e-3)


def test_without_training_what_is_missing_is_shown_as_missing(copied, capsys):
    """And nothing is written, unless that is asked for; every file that is written is told."""
    lost = read(copied).of("layer norm", 2, 1)[0]
    shutil.rmtree(copied / "runs" / lost.id)
    before = contents(copied)
    assert main([*TINY, "--out", str(copied), "--no-train"]) == 0
    assert "48 of 48 runs" in capsys.readouterr().out  # the file tells of it
    assert contents(copied) == before
    (copied / f"{NAME}.json").unlink()
    before = contents(copied)
    assert main([*TINY, "--out", str(copied), "--no-train"]) == 0
    output = capsys.readouterr().out
    assert "47 of 48 runs" in output
    assert "3 of 4 runs" in output
    assert str(copied) not in output
    assert contents(copied) == before
    assert main([*TINY, "--out", str(copied), "--no-train", "--rewrite"]) == 0
    assert set(capsys.readouterr().out.splitlines()[-3:]) == {str(copied / f"{NAME}.{kind}") for kind in KINDS}
    assert contents(copied).keys() - before.keys() == {copied / f"{NAME}.json"}
    found = read(copied)
    assert found.cell("layer norm", 2, 1) is None
    assert [goal.open for goal in goals(found)] == [["2 x 1"]] * 2


def test_a_file_about_other_images_is_not_mixed_with_these(copied, capsys):
    replace(read(copied), fingerprint="other").write(copied)
    assert main([*TINY, "--out", str(copied), "--no-train"]) == 2
    assert "is about other images: choose another --out" in capsys.readouterr().err
    assert read(copied).fingerprint == "other"


def test_the_page_is_filled_between_its_marks(copied, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {NAME} -->\nold\n<!-- end of {NAME} -->\nafter\n", encoding="utf-8")
    before = contents(copied)
    assert main([*TINY, "--out", str(copied), "--no-train", "--page", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert contents(copied) == before
    tables = markdown(read(copied))
    whole = f"before\n<!-- {NAME} -->\n\n{tables}\n\n<!-- end of {NAME} -->\nafter\n"
    assert page.read_text(encoding="utf-8") == whole
    fill(page, read(copied))  # again changes nothing
    assert page.read_text(encoding="utf-8") == whole


def test_without_training_nothing_is_downloaded(copied, tmp_path, monkeypatch, capsys):
    """Images that are not here are not needed where a file tells of runs, and are asked for where none does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ["bench-online", "--net", "fully-connected", "--samples", "1", "--no-train", "--out", str(copied)]
    assert main(command) == 2
    assert "no CIFAR-10 in" in (said := capsys.readouterr().err)
    assert "nothing is to be downloaded: pass --data-dir FOLDER" in said
    shutil.copy(RESULTS / "online-fully-connected.json", copied)
    before = contents(copied)
    assert main(command) == 0  # beside runs of other images
    assert "270 of 270 runs" in capsys.readouterr().out
    assert contents(copied) == before
    assert not (tmp_path / "cache").exists()
    assert main(["bench-online", "--rewrite", "--out", str(copied)]) == 2
    assert "--rewrite is for --no-train" in capsys.readouterr().err


def test_a_page_without_marks_is_refused_before_the_work(tmp_path, capsys):
    page, out = tmp_path / "page.md", tmp_path / "out"
    assert main([*TINY, "--out", str(out), "--page", str(page)]) == 2
    assert "page.md cannot be read" in capsys.readouterr().err
    page.write_text("no marks", encoding="utf-8")
    assert main([*TINY, "--out", str(out), "--page", str(page)]) == 2
    assert f"put the lines <!-- {NAME} --> and <!-- end of {NAME} --> there" in capsys.readouterr().err
    assert not out.exists()


def test_figures_of_the_paper_may_lie_beside_it(measured):
    assert read_folder(measured) == []


def test_other_files_are_refused(tmp_path):
    for content in ("{}", "[]", '{"online": 1, "grid": {}}'):
        (tmp_path / "file.json").write_text(content, encoding="utf-8")
        with pytest.raises(StoreError, match="no result of bench-online"):
            read_online(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--net", "deep"], ["deep", "recurrent"]),
        (["--samples", "1,0"], ["'0'", "1 or more"]),
        (["--rates", "fast"], ["'fast'", "0.01,0.1"]),
        (["--rates", "0.1,-1.0"], ["'0.1,-1.0'", "positive"]),
        (["--rates", "9"], ["--rates 9", "5 of its own"]),
        (["--data", "shakespeare"], ["shakespeare", "digits"]),
        (["--data-dir", "nowhere"], ["nowhere does not exist"]),
        (["--data", "digits", "--size", "8", "--samples", "32"], ["8 training images make no update of 32"]),
    ],
    ids=" ".join,
)
def test_bad_command_lines_end_with_one_line_and_code_2(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused(["bench-online", *options], words, capsys)


# Goals, by numbers made up


def made_up(net, ours, theirs, norm="layer norm", samples=(1,), rate_count=2):
    """Accuracies in per cent, a row of seeds for each rate; None: diverged."""
    grid = Grid(net, samples, (1,), tuple(0.01 * (i + 1) for i in range(rate_count)), len(ours[0]), 64, "digits")
    runs = []
    for name, rows in (("streaming", ours), (norm, theirs)):
        for size in samples:
            for rate, seeds in zip(grid.rates, rows, strict=True):
                for seed, accuracy in enumerate(seeds):
                    ends = (0.9, None, None) if accuracy is None else (1 - accuracy / 100, 1.0, 1.0)
                    outcome = "diverged" if accuracy is None else "finished"
                    runs.append(Trained((name,), size, 1, rate, seed, outcome, *ends, 1.0, "0"))
    return Online(grid, "", "", [], {"loss": math.log(10), "error": 0.9}, runs)


def test_best_median_and_errors_of_a_cell():
    found = made_up("recurrent", [[30, 34], [50, None], [20, 20]], [[40, 40]] * 3, rate_count=3)
    cell = found.cell("streaming", 1, 1)
    assert cell.best == pytest.approx((32, 2))
    assert cell.rate == pytest.approx(0.01)
    assert cell.means[0.02] == pytest.approx((30, 20))  # half of its runs guess
    assert cell.median == pytest.approx(median([32, 30, 20]))
    assert cell.diverged == {0.01: 0, 0.02: 1, 0.03: 0}
    assert "32.0 (30.0) [1]" in table(found)
    assert "| streaming | 32.0 ± 2.0 @ 0.01 (30.0) [1] |" in markdown(found)


def test_the_rate_is_chosen_by_images_that_are_held_out():
    """And what is shown is the accuracy on the test images. Older files have none: the test images choose."""
    found = made_up("recurrent", [[30, 34], [50, 52]], [[40, 40]] * 2)
    assert found.cell("streaming", 1, 1).rate == pytest.approx(0.02)
    assert "; the best rate by the test images" in heading(found)
    errors = {0.01: 0.5, 0.02: 0.6}
    runs = [replace(run, valid_error=errors[run.rate]) for run in found.runs]
    chosen = replace(found, grid=replace(found.grid, held_out=300), runs=runs)
    assert chosen.cell("streaming", 1, 1).rate == pytest.approx(0.01)
    assert chosen.cell("streaming", 1, 1).best == pytest.approx((32, 2))
    assert "; the best rate by 300 held-out images" in heading(chosen)
    wild = [replace(run, test_loss=24.0) if run.rate == 0.01 else run for run in runs]
    assert replace(chosen, runs=wild).cell("streaming", 1, 1).rate == pytest.approx(0.02)


def test_an_absurd_loss_is_divergence_and_the_limit_is_ten_times_guessing():
    found = made_up("recurrent", [[30, 34]], [[40, 40]], rate_count=1)
    run = found.runs[0]
    guess = found.chance["loss"]
    diverged = [found.has_diverged(replace(run, test_loss=loss)) for loss in (guess, 10 * guess, 10.01 * guess, None)]
    assert diverged == [False, False, True, True]
    assert found.accuracy(replace(run, test_loss=24.0)) == pytest.approx(10)


@pytest.mark.parametrize(
    ("ours", "theirs", "lost"),
    [
        ([[30, 30], [None, 30]], [[30, 30], [30, 30]], "at 0.02"),
        ([[30, 30], [None, None]], [[30, 30], [None, 30]], "at 0.02"),
        ([[30, 30], [None, None]], [[30, 30], [None, None]], None),
        ([[30, 30], [30, 30]], [[30, 30], [None, None]], None),
        ([[30, None], [None, 30]], [[30, 30], [None, None]], "at 0.01"),
    ],
)
def test_the_goal_of_steadiness(ours, theirs, lost):
    goal = goals(made_up("recurrent", ours, theirs))[0]
    assert goal.lost == ({"1 x 1": lost} if lost else {})
    assert goal.reached == ([] if lost else ["1 x 1"])


@pytest.mark.parametrize(
    ("ours", "reached"),
    [([39, 41], True), ([37, 41], True), ([34.9, 37.1], False), ([38.6, 38.6], True), ([38.4, 38.4], False)],
)
def test_the_goal_of_accuracy_allows_one_standard_error_of_the_difference(ours, reached):
    """Layer norm: 40 ± 1.5, so 39 ± 2 is within, 36 ± 1.1 is not, and 38.6 without an error just is."""
    goal = goals(made_up("recurrent", [ours, [10, 10]], [[20, 20], [38.5, 41.5]]))[1]
    assert bool(goal.reached) == reached
    assert bool(goal.lost) != reached


def test_the_goal_of_convolutional_nets_is_to_be_better_with_one_and_two_samples():
    """By more than the error of the difference: what is within it is a tie."""
    one, two, three = [[40, 42], [30, 30]], [[39, 42], [30, 30]], [[42, 44], [30, 30]]
    cases = ((three, one, None), (one, two, "+0.5 ± 1.8"), (two, one, "-0.5 ± 1.8"), (one, one, "+0.0 ± 1.4"))
    for ours, theirs, why in cases:
        goal = goals(made_up("convolutional", ours, theirs, "group norm", samples=(1, 2, 32)))[1]
        names = ["1 x 1", "2 x 1"]
        assert goal.lost == (dict.fromkeys(names, why) if why else {})
        assert goal.reached == ([] if why else names)


@pytest.mark.parametrize(
    ("ours", "word"), [([43, 44], "ahead"), ([40, 44], "level"), ([39, 41], "level"), ([36, 37], "behind")]
)
def test_ahead_and_behind_are_beyond_two_standard_errors(ours, word):
    found = made_up("recurrent", [[30, 30], ours, [30, 30]], [[30, 30], [39.5, 40.5], [30, 30]], rate_count=3)
    assert tally(found) == {"ahead": 0, "level": 0, "behind": 0} | {word: 1}
    assert f"{word} in 1" in markdown(found)
    assert not at_an_end(found)


def test_the_page_says_where_a_best_rate_is_at_an_end():
    found = made_up("recurrent", [[30, 30], [20, 20], [20, 20]], [[20, 20], [20, 20], [40, 40]], rate_count=3)
    assert at_an_end(found) == ["streaming in 1 x 1 (0.01)", "layer norm in 1 x 1 (0.03)"]
    assert "better still: streaming in 1 x 1 (0.01), layer norm in 1 x 1 (0.03)." in markdown(found)


def test_goals_need_all_runs_and_two_seeds():
    found = made_up("recurrent", [[30, 30]] * 2, [[30, 30]] * 2)
    for incomplete in (replace(found, runs=found.runs[1:]), made_up("recurrent", [[30]] * 2, [[30]] * 2)):
        assert [goal.open for goal in goals(incomplete)] == [["1 x 1"]] * 2
        assert "layer norm: open in all cells, for want of runs or seeds" in verdicts(incomplete)
    lost = made_up("recurrent", [[20, 20], [None, 10]], [[30, 30]] * 2)
    assert verdicts(lost).splitlines() == [
        "streaming diverges at no learning rate more often than layer norm: in 0 of 1 cells; not in 1 x 1 (at 0.02)",
        "streaming is at most one standard error of the difference below layer norm: in 0 of 1 cells; "
        "not in 1 x 1 (-10.0 ± 0.0)",
    ]


# Drawings


def test_a_line_has_points_only_where_cells_are_whole(measured):
    pytest.importorskip("matplotlib")
    from streamnorm.lab.view.panels import build_grid

    found = read(measured)
    drawing = build_grid(found)
    assert [axes.get_title() for axes in drawing.axes] == ["1 batch per update", "128 batches per update"]
    whole = {axes.get_title(): _drawn(axes) for axes in drawing.axes}
    assert whole["1 batch per update"] == [found.cell(norm, 2, 1).best[0] for norm in norms_of("fully-connected")]
    missing = build_grid(replace(found, runs=found.runs[1:])).axes[0]
    assert math.isnan(_drawn(missing)[0])
    assert _drawn(missing)[1:] == whole["1 batch per update"][1:]
    for runs, words in ((found.runs, 0), ([], 1)):
        for axes in build_grid(replace(found, runs=runs)).axes:
            assert len(axes.texts) == words


def _drawn(axes):
    return [float(bars[0].get_ydata()[0]) for bars in axes.containers]


# The page


def committed():
    return [read_online(RESULTS / f"online-{net}.json") for net in sorted(NETS)]  # not those of the figure `online`


def test_the_measure_of_online_learning_is_quoted_as_it_is():
    """Every number on the page is computed again from the committed results; nothing else stands between marks."""
    page, found = PAGE.read_text(encoding="utf-8"), committed()
    assert {each.grid.net for each in found} == set(NETS)
    for each in found:  # at least what the goals speak of is whole
        whole = product((OURS, RIVALS[each.grid.net]), each.grid.samples, each.grid.batches)
        assert all(each.cell(*place) for place in whole), each.grid.net
    assert page.count("<!-- online-") == page.count("<!-- end of online-") == len(found)
    for each in found:
        assert filled(page, each.grid.file_name, markdown(each)) == page, each.grid.net
        assert f"(../results/{each.grid.file_name}.png)" in page
        assert (RESULTS / f"{each.grid.file_name}.svg").exists()
        assert (RESULTS / f"{each.grid.file_name}.json").stat().st_size < 400_000


def test_the_page_is_made_again_from_the_committed_files_alone(tmp_path):
    """Without runs and without the images."""
    page = tmp_path / "online.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    found = committed()[0]
    for each in found, replace(found, grid=replace(found.grid, seeds=1)):
        shutil.copy(RESULTS / f"{found.grid.file_name}.json", tmp_path)
        command = shlex.split(each.grid.command)[1:]
        assert main([*command, "--no-train", "--rewrite", "--out", str(tmp_path), "--page", str(page)]) == 0
        now = read_online(tmp_path / f"{found.grid.file_name}.json")
        assert now == replace(each, runs=[run for run in found.runs if run.seed < each.grid.seeds])
        assert (page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")) == (each is found)


@pytest.mark.parametrize("net", NETS)
def test_the_committed_runs_are_those_of_the_grid(net):
    found = next(each for each in committed() if each.grid.net == net)
    planned = {(run.address(found.fingerprint), base): run for run, base in found.grid.runs()}
    for row in found.runs:
        run = planned[row.id, row.rate]
        assert (run.samples, run.batches, run.seed) == (row.samples, row.batches, row.seed)
