"""`streamnorm check`: what it finds here, that it finds what is wrong, and which devices there are."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
import torch
from lab_results import assert_refused

from streamnorm import backends
from streamnorm.lab.check import cases, sequences, times
from streamnorm.lab.check.agreement import difference
from streamnorm.lab.check.cases import CASES, DECLINED, DIFFERS, FAILED, OK, agree, agree_on_sequences
from streamnorm.lab.check.run import line_of
from streamnorm.lab.check.sequences import SEQUENCES
from streamnorm.lab.cli import main
from streamnorm.lab.devices import called, find, present, synchronize
from streamnorm.lab.race import race, ratio, repeat

CPU = torch.device("cpu")
SMALL = {name: CASES[name] for name in ("rows", "masked", "batch norm")}


def test_the_command(tmp_path, capsys):
    """All cases; a short look at the times, without the compiler."""
    out = tmp_path / "new" / "check.json"
    assert main(["check", "--rounds", "1", "--compile-seconds", "0", "--out", str(out)]) == 0
    printed, content = capsys.readouterr().out, json.loads(out.read_text(encoding="utf-8"))
    assert content["good"]
    assert content["about"]["torch"] == torch.__version__
    assert content["about"]["devices"].keys() == set(present())
    assert {row["case"] for row in content["agreement"]} == {*CASES, *SEQUENCES}
    for name, missing in content["about"]["backends"].items():
        rows = [row for row in content["agreement"] if row["backend"] == name]
        assert len(rows) == (0 if missing else len(CASES) + len(SEQUENCES))
        assert f"backend {name}: " in printed
        for row in rows:
            assert row["outcome"] in (OK, DECLINED), row
            assert row["outcome"] == OK or row["words"]
    eager = [row for row in content["times"] if not row["compiled"]]
    assert len(eager) == (1 + len(times.SHAPES)) * (len(times.NORMS) - 1)
    assert all(row["ratio"] > 0 for row in eager)
    assert {row["words"] for row in content["times"] if row["compiled"]} == {times.LATE}
    assert "all agree" in printed


def test_the_law_serves_every_case():
    rows = [row for row in agree(CPU, SMALL) if row.backend == backends.LAW.name]
    assert [row.outcome for row in rows] == [OK] * len(SMALL)
    assert all(0 < row.difference < row.tolerance for row in rows)


def test_whole_sequences(monkeypatch):
    """By the backends that have them, and by the loop of the law; a difference is found."""
    rows = list(agree_on_sequences(CPU))
    served = {row.backend for row in rows if row.outcome == OK}
    assert served == {backends.LAW.name} | ({"cpu"} & set(backends.available()))
    assert all(row.words for row in rows if row.outcome == DECLINED)
    law = sequences.law_of
    monkeypatch.setattr(sequences, "law_of", lambda case: {name: 1.01 * value for name, value in law(case).items()})
    wrong = [row for row in agree_on_sequences(CPU) if row.outcome != DECLINED]
    assert {row.outcome for row in wrong} == {DIFFERS}


def test_what_is_declined_has_the_reason_of_the_backend():
    """Word for word as `explain` has it."""
    rows = [row for row in agree(CPU, SMALL) if row.outcome == DECLINED]
    assert rows or backends.available() == [backends.LAW.name]
    for row in rows:
        case = SMALL[row.case]
        x, _, mask = cases.law_of(case)[1][0]
        with backends.use(row.backend):
            assert f"{row.backend} does not: {row.words}." in backends.explain(cases.layer_of(case), x, mask)


@contextmanager
def broken(part, change):
    """The law with another result of a pass, in this process alone."""
    law, method = backends.LAW, getattr(backends.LAW, part)
    setattr(law, part, lambda *arguments: change(method(*arguments)))
    try:
        yield
    finally:
        delattr(law, part)


def scaled(result, factor=1 + 1e-3):
    first, *rest = result
    return first * factor, *rest


def compared(case, expected, given):
    """The law once more, on the data of before."""
    trained = partial(cases.trained_by, backends.LAW.name, case, given)
    return cases._compared(backends.LAW.name, "rows", trained, expected, cases.arithmetic(case))


def raising(result):
    raise RuntimeError("no memory\nat all")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_wrong_value_or_gradient_is_found(part):
    """Wherever it is wrong: the law is made once, before."""
    case = CASES["rows"]
    expected, given = cases.law_of(case)
    with broken(part, scaled):
        row = compared(case, expected, given)
    assert row.outcome == DIFFERS
    assert row.difference > row.tolerance == 1e-5
    assert ("output" if part == "forward" else "gradient of input") in row.where
    assert row.where in line_of(row)


def test_a_failure_is_told_in_a_line():
    case = CASES["rows"]
    expected, given = cases.law_of(case)
    with broken("forward", raising):
        row = compared(case, expected, given)
    assert (row.outcome, row.words) == (FAILED, "RuntimeError: no memory")
    assert not row.is_good


def test_results_that_do_not_repeat_are_found():
    """One bit is enough, where no tolerance would see it."""
    case, factors = CASES["rows"], iter([1.0] * 5 + [1 + 2e-7] * 100)
    expected, given = cases.law_of(case)
    with broken("forward", lambda result: scaled(result, next(factors))):
        row = compared(case, expected, given)
    assert row.difference < row.tolerance
    assert not row.repeats
    assert row.outcome == DIFFERS
    assert "other bits" in line_of(row)


def test_the_command_ends_with_1_where_something_differs(capsys):
    """Every pass is off by more than the one before: no two trainings are alike."""
    numbers = count()
    with broken("forward", lambda result: scaled(result, 1 + 1e-3 * next(numbers))):
        assert main(["check", "--no-times"]) == 1
    assert "do not agree" in capsys.readouterr().out


def test_differences():
    x = torch.tensor([1.0, 4.0])
    assert difference(x, x) == 0
    assert difference(x + torch.tensor([0.0, 0.5]), x) == 0.125
    assert difference(torch.zeros(2), torch.zeros(2)) == 0
    assert difference(torch.ones(2), torch.zeros(2)) == 1
    assert difference(torch.tensor(True), torch.tensor(False)) == 1
    with pytest.raises(AssertionError, match="shape"):
        difference(x[:1], x)
    with pytest.raises(AssertionError, match="not finite"):
        difference(x, torch.tensor([1.0, torch.inf]))


# Devices


def test_the_devices_that_there_are():
    there = present()
    assert there[0] == "cpu"
    for name in there:
        assert find(name) == torch.device(name)
        synchronize(torch.device(name))
        assert called(torch.device(name))


@pytest.mark.parametrize("name", ["cuda:99", "meta", "gpu", "cpu:1", ""])
@pytest.mark.parametrize(
    "command", [["check"], ["run", "online", "--data", "digits"], ["bench-online", "--data", "digits"], ["compare"]]
)
def test_a_device_that_is_not_there_is_refused_before_any_work(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_refused([*command, "--device", name], [f"no device called {name!r}", *present()], capsys)
    assert not list(tmp_path.iterdir())


# Times


def test_a_race_is_run_in_turns_and_waits():
    order = []
    calls = {name: (lambda name=name: order.append(name), 1.0) for name in "ab"}
    found = race(calls, 4, 0.5, lambda: order.append("|"))
    assert "".join(order) == "|b||a||a||b||b||a||a||b|"
    assert [len(each) for each in found.values()] == [4, 4]
    assert repeat(lambda: order.clear(), 3, 1.0) > 0
    assert ratio([1.0, 2.0, 9.0], [1.0, 1.0, 3.0]) == 2


def test_where_the_compiler_does_not_work_it_is_said(tmp_path):
    """Without a compiler of C++, which the CPU's code needs."""
    code = (
        "import torch; from streamnorm.lab.check import times;"
        "times.SHAPES = ((4, 8),); times.SETTLING_SECONDS = 0;"
        "print(*times.measure(torch.device('cpu'), 1, 1.0), sep='\\n')"
    )
    environment = os.environ | {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compiled = [line for line in done.stdout.splitlines() if "compiled=True" in line]
    assert compiled
    assert not any("words=''" in line for line in compiled)
    assert any("Error" in line for line in compiled)
