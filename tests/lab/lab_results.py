"""Results as training gives them, made up in no time."""

import math
import random
from dataclasses import replace

from streamnorm.lab.cli import main
from streamnorm.lab.figures import FIGURES
from streamnorm.lab.results import FigureResults

VERSIONS = {"streamnorm": "0", "loop": "1", "torch": "2", "python": "3", "machine": "none"}


def result(run, outcome="finished", rows=20):
    """One run: errors that fall, and end below those of other runs by chance alone."""
    generator = random.Random(str(run.settings()))  # which a new field of runs does not change
    rows = 0 if outcome == "refused" else rows
    level = generator.uniform(0.2, 0.5)
    epochs = [round(run.epochs * (i + 1) / rows, 4) for i in range(rows)]
    falling = [level + 0.5 * math.exp(-epoch) + generator.gauss(0, 0.01) for epoch in epochs]
    curves = {"update": list(range(1, rows + 1)), "epoch": epochs, "train_loss": falling, "test_loss": falling}
    if not run.is_text:
        curves |= {"train_error": falling, "test_error": falling}
    if outcome == "diverged":
        curves = {
            name: values[:-1] + [None] * (len(values) > 0) if "_" in name else values for name, values in curves.items()
        }
    return {
        "id": f"{generator.getrandbits(64):016x}",
        "settings": run.settings(),
        "data": "0123abcd",
        "outcome": outcome,
        "message": "" if outcome == "finished" else f"the run {outcome}",
        "curves": curves if rows else {},
        "chance": {"loss": 4.4} if run.is_text else {"loss": 2.3, "error": 0.9},
        "parameters": 1000,
        "updates": rows,
        "seconds": 1.5,
        "threads": 1,
        "versions": VERSIONS,
    }


def results(name, seeds=3, outcomes=None, rows=20, **fields):
    """A figure's results; `outcomes`: those of a label's seeds, where not all finish."""
    figure = FIGURES[name]
    curves = {
        curve.label: [
            result(curve.run.with_seed(seed), outcome, rows)
            for seed, outcome in enumerate((outcomes or {}).get(curve.label, ["finished"] * seeds))
        ]
        for curve in figure.curves
    }
    data = list(dict.fromkeys(curve.run.data for curve in figure.curves))
    whole = FigureResults(figure, "quick", data, "A note.", f"streamnorm run {name}", curves)
    return replace(whole, **fields)


def assert_refused(arguments, words, capsys):
    """The command line ends with code 2 and one line of the command's own, in which all `words` stand."""
    try:
        code = main(arguments)
    except SystemExit as stopped:  # by argparse
        code = stopped.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert all(word in output.err for word in words), output.err
    last = output.err.splitlines()[-1]
    assert last.startswith("streamnorm")
    assert "Traceback" not in output.err


def contents(folder):
    """Every file under `folder`, with what is in it and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
