"""The example of regression: what it watches is what it says, and the page quotes its results."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("river", reason="streams come from river, of the extra streamnorm[streams]")

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs/measured/reinforcement.md", ROOT / "docs/results/regression"

sys.path.insert(0, str(ROOT / "examples"))  # it imports its neighbour
try:
    import online_stream
    import regression_stream as example
finally:
    sys.path.pop(0)


def watched(norm, bound, rate, samples=60):
    rows = example.made(False, False, samples)
    model = example.Regressor(norm, bound, len(rows[0][0]), rate, 0)
    return model, example.prequential(model, rows), rows


@pytest.mark.parametrize("norm", [None, example.SampleNorm, example.StreamingNorm])
def test_it_predicts_as_the_networks_of_the_other_example(norm):
    """Watching changes nothing."""
    _, guesses, rows = watched(norm, None, 0.01)
    network = online_stream.Network(norm, online_stream.SCALED, len(rows[0][0]), 0, 0.01, 0)
    assert guesses == pytest.approx(online_stream.prequential(network, rows), rel=1e-5)


def test_a_small_step_takes_what_was_computed_and_a_bounded_one_no_more():
    small, _, _ = watched(None, None, 1e-4)
    assert all(0 < each < 0.1 for each in small.taken)
    bounded, _, _ = watched(example.SampleNorm, 0.01, 0.1)
    assert all(0.005 < each < 0.015 for each in bounded.taken)
    assert len(bounded.taken) == 60 // example.EVERY


def test_inputs_that_move_slowly_do_and_a_drift_changes_the_target():
    def step(rows):
        return fmean(abs(one[0] - two[0]) for (one, _), (two, _) in pairwise(rows))

    independent, slow = example.made(False, False, 300), example.made(True, False, 300)
    assert step(slow) < 0.2 * step(independent)
    fixed, drifting = example.made(False, False, 300), example.made(False, True, 300)
    assert fixed == independent
    assert [y for _, y in fixed] != [y for _, y in drifting]


def test_it_runs_and_writes(tmp_path, monkeypatch, capsys):
    page, out, names = tmp_path / "page.md", tmp_path / "out", ["approval", "slow"]
    page.write_text(
        "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("regression", *names)), encoding="utf-8"
    )
    options = ["--samples", "50", "--seeds", "2", "--rates", "0.01", "0.02", "--streams", *names]
    monkeypatch.setattr(sys, "argv", ["regression_stream.py", *options, "--out", str(out), "--page", str(page)])
    threads = torch.get_num_threads()
    example.main()
    torch.set_num_threads(threads)
    shown, text = capsys.readouterr(), page.read_text(encoding="utf-8")
    assert "slow: 100%" in shown.err
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    for stream in results["streams"].values():
        assert list(stream["suspects"]) == list(example.SUSPECTS)
        assert example.table(stream) in text
        assert example.table(stream) in shown.out
        for found in stream["suspects"].values():
            assert found["runs"][0]["score"] == min(found["tried"].values())
            assert all(math.isfinite(value) for run in found["runs"] for value in run.values())
    assert "old" not in text
    assert example.filled(text, results) == text


def test_the_page_quotes_the_results():
    results, page = json.loads((RESULTS / "results.json").read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    assert example.filled(page, results) == page
    assert list(results["streams"]) == list(example.ROWS)
    assert results["seeds"] >= 3
    assert "--samples" not in results["command"]
    for stream in results["streams"].values():
        assert list(stream["suspects"]) == list(example.SUSPECTS)
