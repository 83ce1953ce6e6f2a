"""Files of the lab that are not what they should be: one sentence with the file and the fix, never another number."""

import copy
import io
import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab_results import results
from test_train import IMAGE_RUN

from streamnorm.lab import commands, store
from streamnorm.lab.cli import main
from streamnorm.lab.compared import read_compared
from streamnorm.lab.data import load_images
from streamnorm.lab.errors import StoreError
from streamnorm.lab.online import read_online
from streamnorm.lab.results import read_results
from streamnorm.lab.shapes import fit
from streamnorm.lab.train import Training, load_checkpoint, train

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture(scope="module")
def digits():
    return load_images("digits")


@pytest.fixture
def checkpoint(digits, tmp_path):
    """Of a run that was stopped after three updates."""
    training = Training(IMAGE_RUN, digits, tmp_path / IMAGE_RUN.address(digits.fingerprint))
    training.resume()
    for _ in range(3):
        training.update()
        training.note()
    training.save()
    training.log.close()
    return training.folder / "checkpoint.pt"


def refused(call, path):
    """One line that names the file and says what to do with it."""
    with pytest.raises(StoreError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "remove it" in message or "move it" in message
    return message


# The checkpoint


def test_a_flipped_bit_in_a_checkpoint_is_no_other_number(digits, checkpoint, tmp_path):
    """Anywhere in the file: in its head, in the numbers of the model, in what stands between them."""
    whole, generator = checkpoint.read_bytes(), random.Random(0)
    places = [*range(8 * 120), *(generator.randrange(8 * len(whole)) for _ in range(1000)), 8 * len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        checkpoint.write_bytes(damaged)
        refused(lambda: load_checkpoint(checkpoint), checkpoint)
    refused(lambda: train(IMAGE_RUN, digits, tmp_path), checkpoint)
    checkpoint.write_bytes(whole)
    assert load_checkpoint(checkpoint)["done"] == 3


def test_a_checkpoint_that_is_cut_or_grown_is_named(digits, checkpoint, tmp_path):
    whole, generator = checkpoint.read_bytes(), random.Random(0)
    cuts = [0, 1, 50, 101, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(50))]
    for damaged in (*(whole[:cut] for cut in cuts), whole + b"\0", bytes(1000), b"[1]", whole[101:]):
        checkpoint.write_bytes(damaged)
        refused(lambda: train(IMAGE_RUN, digits, tmp_path), checkpoint)


def without(key):
    return lambda state: {name: value for name, value in state.items() if name != key}


BAD_STATES = {
    "a list": lambda state: [state],
    "a number": lambda state: 3,
    "nothing": lambda state: None,
    "empty": lambda state: {},
    "no model": without("model"),
    "no random": without("random"),
    "a model of another run": lambda state: state | {"model": {"weight": torch.zeros(3)}},
    "a model of other shapes": lambda state: state | {"model": {k: v.new_zeros(7) for k, v in state["model"].items()}},
    "a list of models": lambda state: state | {"model": [1]},
    "another optimizer": lambda state: state | {"optimizer": {"optimizer": {}}},
    "updates in words": lambda state: state | {"done": "three"},
    "rows that are none": lambda state: state | {"rows": "{}"},
    "rows that are numbers": lambda state: state | {"rows": "[1, 2]"},
    "rows that are no JSON": lambda state: state | {"rows": "["},
    "random numbers that are none": lambda state: state | {"random": torch.zeros(3)},
}


@pytest.mark.parametrize("changed", BAD_STATES.values(), ids=BAD_STATES)
def test_a_checkpoint_of_the_wrong_shape_is_named(changed, digits, checkpoint, tmp_path):
    contents = io.BytesIO()
    torch.save(changed(load_checkpoint(checkpoint)), contents)
    store.write_sealed(checkpoint, contents.getvalue())
    refused(lambda: train(IMAGE_RUN, digits, tmp_path), checkpoint)


# Results

NO_RESULTS = {
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a text": b'"online"',
    "no keys": b"{}",
    "empty": b"",
    "cut": b'{"id": "',
    "binary": bytes(range(256)),
    "not a number": b'{"id": NaN}',
    "deep": b"[" * 100_000,
    "digits": b"9" * 100_000,
}


@pytest.mark.parametrize("contents", NO_RESULTS.values(), ids=NO_RESULTS)
def test_a_result_that_is_none_is_named(contents, digits, tmp_path):
    path = tmp_path / "runs" / IMAGE_RUN.address(digits.fingerprint) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(contents)
    refused(lambda: train(IMAGE_RUN, digits, tmp_path / "runs"), path)
    figure = tmp_path / "figure.json"
    figure.write_bytes(contents)
    refused(lambda: read_results(figure), figure)
    refused(lambda: read_online(figure), figure)


def test_a_result_of_another_run_is_named(digits, tmp_path):
    one, two = (replace(IMAGE_RUN, seed=seed) for seed in (0, 1))
    folder = tmp_path / one.address(digits.fingerprint)
    train(one, digits, tmp_path)
    folder.rename(tmp_path / two.address(digits.fingerprint))
    assert f"it is of run {folder.name}" in refused(lambda: train(two, digits, tmp_path), "result.json")


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes" in refused(lambda: read_results(path), path)


WRONG = [None, True, 0, -1, 1.5, "", "text", [], [1], {}, {"a": 1}]


def nodes(value, path=()):
    """Where something else could stand: a few elements of each list and dictionary, all the way down."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in [*items][:3] + [*items][-1:] if isinstance(value, list) else items:
        yield from nodes(each, (*path, key))


def changes(value, count, seed=0):
    """So many copies with one thing in them changed or left out, at random."""
    generator, places = random.Random(seed), [path for path in nodes(value) if path]
    for _ in range(count):
        made = copy.deepcopy(value)
        *path, last = generator.choice(places)
        inner = made
        for key in path:
            inner = inner[key]
        if generator.random() < 0.3:
            del inner[last]
        else:
            inner[last] = generator.choice(WRONG)
        yield made


def ended(arguments, path, capsys):
    """The command works, or says in one line what is wrong with `path`."""
    code = main([*map(str, arguments)])
    errors = capsys.readouterr().err
    assert code in (0, 2)
    if code:
        (line,) = errors.splitlines()
        assert line.startswith(f"streamnorm: {path}")
        assert "move it" in line
    return code


@pytest.mark.parametrize("name", ["online", "rnn"])
def test_results_with_anything_wrong_in_them_are_shown_or_named(name, tmp_path, monkeypatch, capsys):
    outcomes = {"BN 1 x 32": ["refused"] * 2, "BN 2 x 16": ["finished", "diverged"]} if name == "online" else None
    path = results(name, seeds=2, rows=5, outcomes=outcomes).write(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # drawing takes most of the time
    codes = []
    for changed in changes(json.loads(path.read_text(encoding="utf-8")), 150):
        path.write_text(json.dumps(changed), encoding="utf-8")
        codes.append(ended(["report", "--out", tmp_path], path, capsys))
    assert {*codes} == {0, 2}


def test_tables_with_anything_wrong_in_them_are_shown_or_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "draw_grid", lambda found, out: [])
    path = tmp_path / "online-fully-connected.json"
    whole = json.loads((RESULTS / path.name).read_text(encoding="utf-8"))
    command = ["bench-online", "--net", "fully-connected", "--samples", "1,2", "--no-train", "--out", tmp_path]
    codes = []
    for changed in changes(whole | {"runs": whole["runs"][:100]}, 60):
        path.write_text(json.dumps(changed), encoding="utf-8")
        codes.append(ended(command, path, capsys))
    assert {*codes} == {0, 2}


def test_what_is_published_is_read():
    readers = {"online": read_online, "compare": read_compared}
    for path in RESULTS.glob("*.json"):
        kind = next((kind for kind in readers if kind in json.loads(path.read_text(encoding="utf-8"))), None)
        assert readers.get(kind, read_results)(path).runs


def test_every_command_names_a_run_that_is_none(tmp_path, capsys):
    """`run` and `bench-online` with a result of one of their runs damaged."""
    run = ["run", "dau", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path)]
    bench = ["bench-online", "--net", "fully-connected", "--data", "digits", "--size", "64", "--samples", "32"]
    bench += ["--batches", "1", "--rates", "1", "--seeds", "1", "--out", str(tmp_path)]
    for command in (run, bench, [*bench, "--no-train"]):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        assert main([part for part in command if part != "--no-train"]) == 0
        path = sorted(tmp_path.glob("runs/*/result.json"))[0]
        path.write_text("[]", encoding="utf-8")
        for told in tmp_path.glob("online-*.json"):
            told.unlink()  # what it tells of is not read again
        capsys.readouterr()
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"streamnorm: {path} is no result of this run (it must be a dictionary): remove it and run again"


@pytest.mark.parametrize(
    ("value", "shape", "words"),
    [
        (True, int, "it must be a whole number"),
        (1.5, int, "whole number"),
        (float("inf"), float, "it must be a number"),
        ([1, [2]], [float], r"it\[1\] must be a number"),
        ({"a": {}}, {"a": {"b": int}}, r"a\.b is missing"),
        ({"a": "x"}, {"a": (float, None)}, "a must be a number or null"),
        ([], {str: int}, "it must be a dictionary"),
    ],
)
def test_shapes(value, shape, words):
    with pytest.raises(ValueError, match=words):
        fit(value, shape)
