"""The comparison of norms: the walk to a learning rate, shared runs, the command, what is said of the results."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from lab_results import assert_refused, contents
from processes import wait_for

from streamnorm import StreamingNorm
from streamnorm.lab import jobs, runs
from streamnorm.lab.cli import main, norms, sizes
from streamnorm.lab.compare import (
    CLOSE,
    HIGHEST,
    LOWEST,
    NETS,
    NORMS,
    RUNGS,
    SIZES,
    Entry,
    Plan,
    best_rung,
    close_rungs,
    next_rungs,
    norms_of,
    rate_of,
    stages,
)
from streamnorm.lab.compared import TEST, TRAINING, Compared, Scored, read_compared
from streamnorm.lab.data import load_images
from streamnorm.lab.errors import StoreError
from streamnorm.lab.models import build, make_norm
from streamnorm.lab.results import read_folder
from streamnorm.lab.tasks import ImageTask
from streamnorm.lab.view.cells import filled
from streamnorm.lab.view.contest import markdown, sentences, table

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs/measured/compare.md", ROOT / "docs/results"
TINY = ["compare", "--net", "fully-connected", "--data", "digits", "--size", "64", "--seeds", "2"]
TINY += ["--sizes", "2x1,1x32,32x1", "--norms", "layer norm,streaming"]
NAME = "compare-fully-connected-digits"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No long measuring, and the same bits as a process with one thread."""
    monkeypatch.setattr(jobs, "MEASURED_SECONDS", 1e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A folder with a small comparison, really trained."""
    out = tmp_path_factory.mktemp("compared")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "MEASURED_SECONDS", 1e-3)
        assert main([*TINY, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(compared, tmp_path):
    return Path(shutil.copytree(compared, tmp_path / "out"))


def read(folder):
    return read_compared(folder / f"{NAME}.json")


# The walk


def walk(accuracy, start):
    found = {}
    while rungs := next_rungs(found, start):
        found |= {rung: accuracy(rung) for rung in rungs}
    return found


@pytest.mark.parametrize("peak", [-8, -5, -4, -3, 0])
def test_the_walk_ends_at_the_top_with_a_neighbour_on_both_sides(peak):
    found = walk(lambda rung: 60 - 5 * abs(rung - peak), -4)
    assert best_rung(found, -4) == peak
    assert {peak - 1, peak, peak + 1} <= set(found)
    assert len(found) == max(abs(peak + 4) + 3, 3)  # nothing is tried in vain


def test_the_walk_keeps_to_the_ladder_and_goes_down_where_nothing_is_learned():
    assert max(walk(lambda rung: 20 + rung, -4)) == HIGHEST
    assert min(walk(lambda rung: 20 - rung, -4)) == LOWEST
    assert min(walk(lambda rung: 10.0, -4)) == LOWEST
    found = walk(lambda rung: 40.0 if rung <= -8 else 10.0, -4)
    assert best_rung(found, -4) == -8
    flat = walk(lambda rung: 40.0 if rung in (-4, -3) else 30.0, -4)  # as good is not worse
    assert set(flat) == {-5, -4, -3, -2}
    assert best_rung(flat, -4) == -4


def test_a_walk_that_was_stopped_goes_on_the_same():
    def accuracy(rung):
        return 60 - 5 * abs(rung + 7)

    whole = walk(accuracy, -4)
    for left in range(len(whole)):
        found = dict(list(whole.items())[:left])
        while rungs := next_rungs(found, -4):
            found[rungs[-1]] = accuracy(rungs[-1])  # one at a time, in another order
        assert found == whole


def test_rates_are_a_ladder_of_factor_three():
    rates = [rate_of(rung) for rung in range(-6, 1)]
    assert rates == [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]


# Runs


def test_windows_of_32_are_seen_longer_and_the_last_tenth_is_measured():
    for size in SIZES:
        run = Entry("resnet-8", "batch norm", *size).run(-3, 0)
        full = size[0] * size[1] == 32
        assert (run.train_size, run.epochs) == ((8_000, 2) if full else (6_000, 1))
        total = run.train_size * run.epochs // run.samples
        assert run.evaluate == pytest.approx(0.9 * total, abs=1)
        assert (run.momentum, run.held_out, run.side) == (0.9, 2_000, 16)
    assert Entry("resnet-8", "MABN", 2, 1).run(-3, 0).norm.schedule == (16, 100, 600)
    assert Entry("resnet-8", "Batch Renorm", 2, 1).run(-3, 0).norm.schedule == (115, 576, 923)


def test_the_rate_falls_in_the_second_half():
    run = Entry("resnet-8", "group norm", 32, 1).run(-3, 0)
    assert [run.rate(epoch) for epoch in (0, 0.5, 1)] == [0.03] * 3
    assert [run.rate(epoch) for epoch in (1.5, 2)] == pytest.approx([0.015, 0])


def test_held_out_images_are_neither_trained_on_nor_test_images():
    images = load_images("digits")
    run = Entry("resnet-8", "none", 2, 1).run(-3, 0, data="digits")
    task = ImageTask(replace(run, train_size=None), images)
    assert len(task.x) + len(task.valid[0]) == len(images.train)
    assert len(task.valid[0]) == 287
    assert torch.equal(task.valid[1], images.train_labels[-287:])
    assert torch.equal(task.y, images.train_labels[:-287])
    assert torch.equal(task.test[1], images.test_labels)
    whole = images.train[0].float()
    averaged = (whole[:, ::2, ::2] + whole[:, 1::2, ::2] + whole[:, ::2, 1::2] + whole[:, 1::2, 1::2]) / 4
    torch.testing.assert_close(task.x[0], averaged)


def test_evaluation_changes_no_image():
    task = ImageTask(Entry("resnet-8", "none", 2, 1).run(-3, 0, data="digits"), load_images("digits"))
    before = [task.test[0].clone(), task.valid[0].clone()]
    task.evaluate(lambda x: torch.zeros(len(x), 10))
    assert all(torch.equal(a, b) for a, b in zip(before, (task.test[0], task.valid[0]), strict=True))


def test_the_order_of_the_work():
    """Peers first, of them the first seed first, of that the resnet, of that 2x1 and 1x32; no entry twice."""
    plans = [Plan(net) for net in NETS]
    order = [(stage, entry) for stage in stages(plans) for entry in stage.entries]
    ours = [entry.norm.startswith("streaming") for _, entry in order]
    assert ours == sorted(ours)
    peers = [
        (stage.seeds, list(NETS).index(entry.net)) for (stage, entry), our in zip(order, ours, strict=True) if not our
    ]
    assert peers == sorted(peers)
    first = list(stages(plans))[:6]
    assert [(stage.entries[0].samples, stage.entries[0].batches) for stage in first[:2]] == [(2, 1), (32, 1)]
    assert {(entry.samples, entry.batches) for entry in first[1].entries} == {(1, 32), (32, 1)}  # as it is trained
    assert set(Counter((stage.seeds, entry) for stage, entry in order).values()) == {1}
    assert all(stage.seeds == 1 for stage in stages([Plan("recurrent", seeds=1)]))


def test_a_plan_names_the_command_that_trains_it():
    assert Plan("recurrent").command == "streamnorm compare --net recurrent"
    other = Plan("recurrent", sizes(" 1x32,2x1"), norms("mabn,none"), 1, 64, "digits")
    options = '--sizes 2x1,1x32 --norms "none,MABN" --seeds 1 --size 64 --data digits'
    assert other.command == f"streamnorm compare --net recurrent {options}"


# The command


def test_the_command_trains_to_a_table(compared, capsys):
    found = read(compared)
    assert main([*TINY, "--out", str(compared)]) == 0  # nothing is trained again
    output = capsys.readouterr()
    assert output.err == ""
    assert table(found) in output.out
    assert sentences(found) in output.out
    assert (compared / f"{NAME}.md").read_text(encoding="utf-8") == markdown(found) + "\n"
    assert {run.id for run in found.runs} == {path.name for path in (compared / "runs").iterdir()}
    for norm in found.plan.rows:
        for size in found.plan.sizes:
            cell = found.cell(Entry("fully-connected", norm, *size))
            assert 0 <= cell.accuracy[0] <= 100
            assert cell.loss[0] > 0
    assert found.write(compared).read_bytes() == (compared / f"{NAME}.json").read_bytes()
    assert read_folder(compared) == []


def test_a_cell_is_computed_from_the_runs(compared):
    found = read(compared)
    entry = Entry("fully-connected", "streaming", 2, 1)
    cell = found.cell(entry)
    runs = [run for run in found.of(entry) if run.rate == cell.rate]
    assert sorted(run.seed for run in runs) == [0, 1]
    walked = found.walked(entry)
    for rung in close_rungs(walked):
        both = [found.accuracy(run, "valid") for run in found.seeds_at(entry, rung).values()]
        assert len(both) == 2
        assert fmean(both) <= fmean(found.accuracy(run, "valid") for run in runs)
    assert max(walked.values()) - walked[RUNGS[cell.rate]] <= CLOSE
    results = [json.loads((compared / "runs" / run.id / "result.json").read_text(encoding="utf-8")) for run in runs]
    accuracies = [100 * (1 - result["curves"]["test_error"][-1]) for result in results]
    assert cell.accuracy == pytest.approx((fmean(accuracies), stdev(accuracies) / math.sqrt(2)))
    assert len(walked) < len(found.of(entry))
    assert all(len(result["curves"]["epoch"]) == 2 for result in results)  # the last row is of the last tenth


def test_norms_of_single_samples_are_trained_once_for_all_splits(compared):
    found = read(compared)
    ids = {
        norm: [
            {run.id for run in found.of(Entry("fully-connected", norm, *size))} for size in ((1, 32), (32, 1), (2, 1))
        ]
        for norm in found.plan.rows
    }
    assert ids["layer norm"][0] == ids["layer norm"][1]
    for norm in found.plan.rows:
        assert ids[norm][0] & ids[norm][1] == (ids[norm][0] if norm == "layer norm" else set())
        assert not ids[norm][0] & ids[norm][2]
    row = next(line for line in table(found).splitlines() if line.startswith("layer norm"))
    one, two = row.split("  ")[-2:]
    assert one.strip() == two.strip()


def test_killed_it_goes_on_to_the_same_end(compared, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "streamnorm", *TINY, "--out", out]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: len(list(out.glob("runs/*/result.json"))) > 3, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    done = {path.parent.name for path in out.glob("runs/*/result.json")}
    whole = read(compared)
    assert 3 < len(done) < len(whole.runs)
    assert main([*TINY, "--out", str(out)]) == 0
    one, two = ([replace(run, seconds=0) for run in each.runs] for each in (read(out), whole))
    assert one == two
    assert table(read(out)) == table(whole)


def test_what_is_missing_is_shown_as_missing_and_trained_again(copied, capsys):
    whole = read(copied)
    entry = Entry("fully-connected", "streaming", 2, 1)
    lost = next(run for run in whole.of(entry) if run.seed == 1)
    shutil.rmtree(copied / "runs" / lost.id)
    (copied / f"{NAME}.json").unlink()
    before = contents(copied)
    assert main([*TINY, "--out", str(copied), "--no-train"]) == 0
    output = capsys.readouterr().out
    assert contents(copied) == before
    assert str(copied) not in output
    assert f"{len(whole.of(entry)) - 1} runs, no rate yet" in output
    assert "\n2x1: streaming" not in output
    assert "1x32: streaming" in output
    assert not (copied / "runs" / lost.id).exists()
    for run in whole.of(entry):
        shutil.rmtree(copied / "runs" / run.id, ignore_errors=True)
    assert main([*TINY, "--out", str(copied), "--no-train"]) == 0
    assert "0 runs, no rate yet" in capsys.readouterr().out
    assert main([*TINY, "--out", str(copied)]) == 0
    assert "part" in capsys.readouterr().err
    assert table(read(copied)) == table(whole)


def test_the_file_alone_is_enough_and_runs_of_other_images_do_not_count(copied, capsys):
    shutil.rmtree(copied / "runs")
    whole = read(copied)
    (copied / f"{NAME}.md").unlink()
    assert main([*TINY, "--out", str(copied), "--no-train", "--rewrite"]) == 0
    output = capsys.readouterr().out
    assert table(whole) in output
    assert output.splitlines()[-4:] == [str(copied / f"{NAME}.{kind}") for kind in ("json", "md", "png", "svg")]
    assert (copied / f"{NAME}.md").read_text(encoding="utf-8") == markdown(whole) + "\n"
    assert read(copied) == whole
    other = [*TINY, "--out", str(copied), "--no-train"]
    other[other.index("64")] = "96"
    assert main(other) == 0
    assert "0 runs, no rate yet" in capsys.readouterr().out


def test_the_page_is_filled_between_its_marks(copied, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {NAME} -->\nold\n<!-- end of {NAME} -->\nafter\n", encoding="utf-8")
    before = contents(copied)
    assert main([*TINY, "--out", str(copied), "--no-train", "--page", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert contents(copied) == before
    expected = f"before\n<!-- {NAME} -->\n\n{markdown(read(copied))}\n\n<!-- end of {NAME} -->\nafter\n"
    assert page.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--net", "deep"], ["deep", "resnet-8"]),
        (["--sizes", "2"], ["'2'", "such as 2x16"]),
        (["--sizes", "0x1"], ["'0'", "1 or more"]),
        (["--norms", "no"], ["'no'", "Online Norm"]),
        (["--net", "recurrent", "--norms", "frn + tlu"], ["none that recurrent can have", "layer norm"]),
        (["--data", "shakespeare"], ["shakespeare", "digits"]),
        (["--data-folder", "nowhere"], ["nowhere does not exist"]),
        (["--page", "none.md"], ["none.md cannot be read"]),
        (["--data", "digits", "--size", "8", "--net", "recurrent"], ["8 training images make no update of 32"]),
    ],
    ids=" ".join,
)
def test_bad_command_lines_end_with_one_line_and_code_2(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused(["compare", *options], words, capsys)


def test_mistakes_are_answered_before_torch_is_imported(tmp_path):
    code = "import sys; from streamnorm.lab.cli import main; main(['compare', '--data-dir', 'no']); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "False\n", done.stderr


def test_other_files_are_refused(tmp_path):
    for content in ("{}", "[]", '{"compare": 1, "plan": {}}'):
        (tmp_path / "file.json").write_text(content, encoding="utf-8")
        with pytest.raises(StoreError, match="no result of compare"):
            read_compared(tmp_path / "file.json")


def test_streaming_is_the_default_of_the_library():
    assert make_norm(NORMS["streaming"], 8, 1).config == StreamingNorm(8).config


@pytest.mark.parametrize("norm", norms_of("recurrent"))
def test_gains_can_begin_with_another_number_and_nothing_else_is_changed(norm):
    run, found = Entry("recurrent", norm, 2, 1).run(-6, 0), []
    for each in (replace(run, gain=0.5), run):
        torch.manual_seed(0)
        found.append(dict(build(each).named_parameters()))
    gains = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    assert len(gains) == (0 if norm == "none" else 2)  # of the input's norm, and of the hidden state's
    for name in gains:
        assert torch.equal(found[0][name], torch.full((128,), 0.5))
        assert torch.equal(found[1][name], torch.ones(128))


def test_results_of_another_guard_are_no_results_of_this_one(monkeypatch):
    """Nor are they thrown away where nothing is guarded."""
    guarded, other = (Entry("resnet-8", norm, 2, 1).run(-5, 0) for norm in ("streaming", "group norm"))
    before = [run.address("data") for run in (guarded, other)]
    monkeypatch.setattr(runs, "GUARD_VERSION", runs.GUARD_VERSION + 1)
    assert [run.address("data") == name for run, name in zip((guarded, other), before, strict=True)] == [False, True]


# What is said, by numbers made up


def made_up(accuracies, net="resnet-8", seeds=2):
    """By norm: what the seeds have on the test images at the best rate, all rates around it being worse."""
    plan = Plan(net, ((2, 1),), tuple(accuracies), seeds, None, "digits")
    runs = []
    for norm, values in accuracies.items():
        entry = Entry(net, norm, 2, 1)
        for rung in (entry.start - 1, entry.start, entry.start + 1):
            for seed, value in enumerate(values if rung == entry.start else values[:1]):
                valid = 0.5 if rung == entry.start else 0.6
                ends = (valid, 1 - value / 100, 1.0, 1.5)
                runs.append(Scored(norm, 2, 1, rate_of(rung), seed, "finished", *ends, 1.0, f"{norm}{rung}{seed}"))
    return Compared(plan, "", "", [], {"loss": math.log(10), "error": 0.9}, runs)


def test_the_rate_is_chosen_by_validation_images_and_not_by_test_images():
    found = made_up({"streaming": [40, 44]})
    entry = Entry("resnet-8", "streaming", 2, 1)
    better = [replace(run, test_error=0.1) if run.rate != rate_of(entry.start) else run for run in found.runs]
    found = replace(found, runs=better)
    assert found.rate(entry) == rate_of(entry.start)
    assert found.cell(entry).accuracy == pytest.approx((42, 2))
    turned = [replace(run, valid_error=1 - run.valid_error) for run in better]  # now a neighbour has 60 %
    assert replace(found, runs=turned).rate(entry) is None


def test_rates_that_are_close_with_one_seed_are_decided_between_by_all():
    found = made_up({"streaming": [40, 44]})
    entry = Entry("resnet-8", "streaming", 2, 1)
    near = rate_of(entry.start + 1)
    runs = [replace(run, valid_error=0.51) if run.rate == near else run for run in found.runs]
    found = replace(found, runs=runs)
    assert found.missing(entry, 2) == [(entry.start + 1, 1)]
    assert found.rate(entry) is None
    assert found.missing(entry, 1) == []
    other = next(run for run in runs if run.rate == near)
    for valid, rate in ((0.48, near), (0.5, rate_of(entry.start))):
        more = replace(found, runs=[*runs, replace(other, seed=1, valid_error=valid, test_error=0.9, id="more")])
        assert more.rate(entry) == rate
    assert close_rungs({-5: 40.0, -4: 41.5, -3: 39.9}) == [-5, -4]


def test_a_run_that_diverged_counts_as_guessing():
    found = made_up({"streaming": [40, 44]})
    entry = Entry("resnet-8", "streaming", 2, 1)
    for change in ({"test_loss": 24.0}, {"test_loss": None}, {"outcome": "diverged"}):
        runs = [replace(run, **change) if run.seed == 1 else run for run in found.runs]
        assert replace(found, runs=runs).cell(entry).accuracy[0] == pytest.approx(25)


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        ([39, 41], [39.5, 40.5], "2x1: streaming ties with group norm, +0.0 ± 1.1 (held out: +0.0)."),
        ([37, 39], [39.5, 40.5], "Lost: 2x1: streaming is behind group norm, -2.0 ± 1.1 (held out: +0.0)."),
        ([43, 45], [39.5, 40.5], "2x1: streaming is ahead of group norm, +4.0 ± 1.1 (held out: +0.0)."),
    ],
)
def test_within_one_standard_error_of_the_difference_it_is_a_tie(ours, theirs, sentence):
    found = made_up({"batch norm": [20, 21], "group norm": theirs, "streaming": ours})
    assert sentences(found) == sentence
    assert "| streaming | " + f"{fmean(ours):.1f} ± 1.0 @ 0.003 |" in markdown(found)


def test_standardized_is_measured_against_standardized_and_lost_ones_come_first():
    cells = {"group norm": [40, 41], "group norm + WS": [50, 51], "streaming": [45, 46], "streaming + WS": [47, 48]}
    assert sentences(made_up(cells)).splitlines() == [
        "Lost: 2x1: streaming + WS is behind group norm + WS, -3.0 ± 0.7 (held out: +0.0).",
        "2x1: streaming is ahead of group norm, +5.0 ± 0.7 (held out: +0.0).",
    ]


def test_a_difference_on_test_images_stands_beside_that_on_held_out_ones():
    found = made_up({"group norm": [40, 41], "streaming": [45, 46]})
    best = rate_of(Entry("resnet-8", "streaming", 2, 1).start)
    runs = [replace(run, valid_error=0.48 + 0.01 * run.seed) if run.rate == best else run for run in found.runs]
    runs = [replace(run, valid_error=0.5) if run.norm == "group norm" and run.rate == best else run for run in runs]
    assert sentences(replace(found, runs=runs)) == "2x1: streaming is ahead of group norm, +5.0 ± 0.7 (held out: +1.5)."


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ((1.40, 1.42), "2x1: streaming is ahead of group norm, +0.090 ± 0.010 nats."),
        ((1.60, 1.62), "Lost: 2x1: streaming is behind group norm, -0.110 ± 0.010 nats."),
        ((1.49, 1.51), "2x1: streaming ties with group norm, +0.000 ± 0.010 nats."),
    ],
)
def test_the_training_loss_is_judged_too(losses, sentence):
    """By the rival whose loss is the lowest, not by the one whose accuracy is the highest."""
    found = made_up({"batch norm": [50, 51], "group norm": [40, 41], "streaming": [45, 46]})
    worse = {"batch norm": 1.9}
    runs = [replace(run, train_loss=worse.get(run.norm, run.train_loss)) for run in found.runs]
    runs = [replace(run, train_loss=losses[run.seed]) if run.norm == "streaming" else run for run in runs]
    found = replace(found, runs=runs)
    assert sentences(found, TRAINING) == sentence
    assert sentence in markdown(found)
    assert sentences(found).startswith("Lost: 2x1: streaming is behind batch norm")


def test_nothing_is_said_without_all_runs_or_with_one_seed():
    found = made_up({"group norm": [40, 41], "streaming": [45, 46]})
    for incomplete in (replace(found, runs=found.runs[1:]), made_up({"group norm": [40], "streaming": [45]}, seeds=1)):
        assert sentences(incomplete) == "No cell is judged yet, for want of runs or seeds."


def test_what_cannot_run_says_so():
    found = replace(made_up({"batch norm": [20, 21]}, "recurrent"), plan=Plan("recurrent", ((1, 1),), ("batch norm",)))
    assert "| batch norm | cannot run |" in markdown(found)


# The page


def committed():
    return [read_compared(path) for path in sorted(RESULTS.glob("compare-*.json"))]


def test_the_comparison_is_quoted_as_it_is():
    """Every number on the page is computed again from the committed results."""
    page = PAGE.read_text(encoding="utf-8")
    for net in NETS:
        assert f"<!-- compare-{net} -->" in page
    for each in committed():
        assert filled(page, each.plan.file_name, markdown(each)) == page, each.plan.net


def test_the_page_says_how_many_cells_are_lost():
    told = []
    for part in (TEST, TRAINING):
        verdicts = [verdict for each in committed() for verdict in each.verdicts(part)]
        for ours in ("streaming", "streaming + WS"):
            outcomes = [verdict.outcome for verdict in verdicts if verdict.ours == ours]
            told.append(f"{outcomes.count('lost')} of {len(outcomes)}")
    test, ws, training, training_ws = told
    words = f"`streaming` is behind in {test} cells and `streaming + WS` in {ws}; by training loss in {training} and "
    assert words + training_ws in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_the_page_names_every_norm():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"| {norm} |" in page for norm in NORMS)
    assert {norm for net in NETS for norm in norms_of(net)} == set(NORMS)


def test_the_drawing_has_a_line_for_each_norm_that_has_a_cell():
    from streamnorm.lab.view.versus import build_compared

    found = next(each for each in committed() if each.plan.net == "resnet-8")
    drawing = build_compared(found)
    shown = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert shown == found.plan.rows
    small, full = drawing.axes
    for axes, places in ((small, [(1, 1), (2, 1), (4, 1)]), (full, [(1, 32), (2, 16), (32, 1)])):
        for norm, bars in zip(shown, axes.containers, strict=True):
            cells = [found.cell(Entry(found.plan.net, norm, *size)).accuracy[0] for size in places]
            assert bars.lines[0].get_ydata().tolist() == cells
        assert len({bars.lines[0].get_linewidth() for bars in axes.containers}) == 1
    without = replace(found, runs=[run for run in found.runs if run.norm != "MABN"])
    assert "MABN" not in [text.get_text() for text in build_compared(without).legends[0].get_texts()]


def test_the_committed_drawings_are_those_of_the_committed_results():
    for found in committed():
        drawn = (RESULTS / f"{found.plan.file_name}.svg").read_text(encoding="utf-8")
        assert table(found) in unescape(drawn), "python tools/pictures.py draws it again"
        assert (RESULTS / f"{found.plan.file_name}.png").exists()
