"""The example of streams: it tests before it trains, its streams do what they say, and the page quotes its results."""

import importlib.util
import json
import runpy
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("river", reason="streams come from river, of the extra streamnorm[streams]")

from river import datasets
from river.datasets import synth

from streamnorm import SampleNorm

ROOT = Path(__file__).parent.parent
SCRIPT, PAGE = ROOT / "examples/online_stream.py", ROOT / "docs/measured/streams.md"
RESULTS = ROOT / "docs/results/streams"


def load():
    specification = importlib.util.spec_from_file_location("online_stream", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


example = load()
SEEN = 30  # samples that two streams have in common


def two_futures(name):
    """Two streams with the same first samples, the next input in common but not its label, and nothing later."""
    samples, classes, _ = example.STREAMS[name]
    rows = samples(SEEN + 20)
    one, other = rows[:SEEN], rows[SEEN + 1 :]
    x, label = rows[SEEN]
    another = next(y for _, y in rows if y != label) if classes else label + 5
    return classes, [*one, (x, label), *other], [*one, (x, another), *other[::-1]]


MODELS = [
    pytest.param(name, i, id=f"{name}, {model}, {given}")
    for name, classes in (("segments", 7), ("approval", 0))
    for i, (model, given, *_) in enumerate(example.methods(1, classes, [0.01], [0]))
]


@pytest.mark.parametrize(("name", "which"), MODELS)
def test_a_prediction_knows_neither_its_label_nor_what_comes_later(name, which):
    classes, one, other = two_futures(name)
    make = list(example.methods(len(one[0][0]), classes, [0.01], [0]))[which][2]
    first, second = (example.prequential(make(0.01, 0), rows) for rows in (one, other))
    assert first[: SEEN + 1] == second[: SEEN + 1]
    assert first[SEEN + 1 :] != second[SEEN + 1 :] or first[SEEN] is None  # then it does, unless it has diverged


def test_seeds_make_a_run():
    rows = example.STREAMS["segments"][0](50)
    make = list(example.methods(18, 7, [0.01], [0]))[-1][2]
    once, again, other = (example.prequential(make(0.01, seed), rows) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_the_drift_is_from_one_concept_to_another():
    rows = example.STREAMS["agrawal-drift"][0](None)
    half, clear = len(rows) // 2, 3 * len(rows) // 40  # three times the width of the change
    old, new = (list(synth.Agrawal(classification_function=i, seed=i).take(len(rows))) for i in (0, 3))
    assert rows[: half - clear] == old[: half - clear]
    start = new.index(rows[half + clear])
    assert rows[half + clear :] == new[start : start + half - clear]


def test_the_new_units_begin_half_way_and_leave_labels_alone():
    rows, plain = example.STREAMS["segments-units"][0](None), list(datasets.ImageSegments())
    half = len(rows) // 2
    assert len(rows) == len(plain) == 2310
    assert rows[:half] == plain[:half]
    assert [y for _, y in rows] == [y for _, y in plain]
    for (x, _), (before, _) in zip(rows[half:], plain[half:], strict=True):
        for i, name in enumerate(before):
            assert x[name] == (10 * before[name] + 100 if i % 2 else before[name])


def test_a_layer_norm_on_the_input_would_not_notice_if_all_units_changed_alike():
    x = torch.tensor([list(x.values()) for x, _ in islice(datasets.ImageSegments(), 20)], dtype=torch.float64)
    norm, changed = SampleNorm(18, dtype=torch.float64), x.clone()
    torch.testing.assert_close(norm(10 * x + 100), norm(x), rtol=1e-5, atol=1e-6)
    changed[:, 1::2] = 10 * x[:, 1::2] + 100
    assert float((norm(changed) - norm(x)).detach().abs().mean()) > 0.3


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ([100.0] * 300, {"after": 100.0, "recovery": 0}),
        ([0.0] * 150 + [100.0] * 150, {"after": 0.0, "recovery": 145}),  # 95 of the next 100 are right
        ([0.0] * 300, {"after": 0.0, "recovery": None}),
        ([0.0] * 60, {"after": 0.0, "recovery": None}),
    ],
)
def test_recovery(after, found):
    assert example.recovery([0.0] * 100 + [100.0] * 200 + after, 300) == {"before": 100.0} | found


def test_no_guess_is_a_wrong_one():
    assert [example.score(guess, "b", 2) for guess in (None, "a", "b")] == [0.0, 0.0, 100.0]
    assert [example.score(guess, 3.0, 0) for guess in (None, 5.0)] == [3.0, 2.0]


def test_a_network_that_is_not_finite_guesses_nothing():
    network = example.Network(None, example.RAW, 2, 2, 0.1, 0)
    network.predict_one({"a": 1.0, "b": 2.0})
    network.learn_one({}, "yes")
    assert network.predict_one({"a": 1.0, "b": 2.0}) == "yes"
    assert network.predict_one({"a": float("nan"), "b": 2.0}) is None


def test_bytes_are_parameters_and_statistics():
    linear = (18 * 64 + 64) + (64 * 64 + 64) + (64 * 7 + 7)
    bare, layer = (example.Network(norm, example.RAW, 18, 7, 0.1, 0) for norm in (None, SampleNorm))
    assert bare._raw_memory_usage == 4 * linear
    assert layer._raw_memory_usage == 4 * (linear + 2 * 2 * 64)
    scaled = example.Network(None, example.SCALED, 18, 7, 0.1, 0)
    assert scaled._raw_memory_usage > bare._raw_memory_usage


def test_it_runs_and_writes(tmp_path, monkeypatch, capsys):
    page, out, names = tmp_path / "page.md", tmp_path / "out", ["segments-units", "approval"]
    marks = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("command", *names))
    page.write_text(f"before\n{marks}after\n", encoding="utf-8")
    options = ["--samples", "50", "--seeds", "2", "--rates", "0.01", "0.02", "--streams", *names]
    monkeypatch.setattr(sys, "argv", ["online_stream.py", *options, "--out", str(out), "--page", str(page)])
    example.main()
    shown, text = capsys.readouterr(), page.read_text(encoding="utf-8")
    assert "segments-units: 100%" in shown.err
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(results["streams"]) == names
    for stream in results["streams"].values():
        assert example.table(stream) in text
        assert example.table(stream) in shown.out
        for method in stream["methods"]:
            assert all(len(run["curve"]) == 50 for run in method["runs"])
            best = (max if stream["classes"] else min)(method["tried"].values(), default=None)
            assert best in (None, method["runs"][0]["score"])
    assert example.filled(text, results) == text
    assert text.startswith("before\n<!-- command -->\n\n2 seeds")
    assert text.endswith("<!-- /approval -->\nafter\n")
    assert "old" not in text
    assert {path.name for path in out.iterdir()} == {"results.json", "curves.svg"}
    assert "</svg>" in (out / "curves.svg").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="no place for command"):
        example.filled("nothing", results)


def test_it_refuses_less_than_it_can_average(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["online_stream.py", "--samples", "10"])
    with pytest.raises(SystemExit):
        example.main()
    assert "at least 1 seed and 50 samples" in capsys.readouterr().err


def test_without_river_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(SystemExit, match=r'pip install "streamnorm\[streams\]"'):
        runpy.run_path(str(SCRIPT))


def test_the_page_quotes_the_results():
    results, page = json.loads((RESULTS / "results.json").read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    assert example.filled(page, results) == page
    assert list(results["streams"]) == list(example.STREAMS)
    assert results["seeds"] >= 3
    assert "--samples" not in results["command"]  # whole streams
    assert "(../results/streams/curves.svg)" in page
    assert (RESULTS / "curves.svg").exists()
