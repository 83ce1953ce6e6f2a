"""Devices other than the CPU, on machines that have none: a second device of torch, made in Python.

It refuses to meet tensors of the CPU (other_device.py). What it cannot show: kernels, streams and rounding of
a real one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from streamnorm.core.state import FIELDS
from streamnorm.lab.check.cases import CASES, DECLINED, OK
from streamnorm.lab.check.sequences import SEQUENCES

HERE = Path(__file__).parent
ONE_THREAD = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
}
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device in Python",
)


def well(command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    well([HERE / "device_cases.py", folder, HERE.parent / "docs/guide/basics.md"])
    return json.loads((folder / "found.json").read_text(encoding="utf-8")) | {
        "check": json.loads((folder / "check.json").read_text(encoding="utf-8"))
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    well(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HERE / "device_processes.py", folder])
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# The lab


def test_it_is_found_by_its_name(found):
    assert found["present"] == ["cpu", "other:0"]
    assert found["found"] == "other"


def test_every_network_is_trained_there_with_every_norm(found):
    """With the weights and the order of the data that the CPU has, so with the same curves."""
    assert len(found["trainings"]) >= 15
    for name, each in found["trainings"].items():
        here, there = each["curves"]
        assert list(each["places"]) == ["other"], name
        assert here.keys() == there.keys()
        for column, values in here.items():
            assert there[column] == pytest.approx(values, rel=1e-3, abs=1e-5), (name, column)


def test_the_data_is_moved_once(found):
    """An update moves nothing to the device: no batch, no index, no constant."""
    for name, each in found["trainings"].items():
        assert each["moved"] == [], name


@pytest.mark.parametrize("name", ["A", "gru"])
def test_a_run_goes_on_exactly_on_its_device_and_on_another(found, name):
    each = found["resumed"]
    for device in ("cpu", "other"):
        assert each[f"{name}: {device} to {device}"] == each[f"{name}: {device}"]
    for way in ("cpu to other", "other to cpu"):
        for column, values in each[f"{name}: cpu"].items():
            assert each[f"{name}: {way}"][column] == pytest.approx(values, rel=1e-3, abs=1e-5), (way, column)


def test_what_is_saved_can_be_loaded_anywhere(found):
    saved = found["saved"]
    assert saved["model"] == saved["moments"] == ["cpu"]
    assert saved["left"] == ["other"]
    assert saved["metadata"]
    assert saved["rest"]
    assert saved["groups"]


def test_results_of_devices_do_not_mix(found):
    """The type is in the address, in the settings and in the names of files; which one of a type is not."""
    cpu, other, first, second = found["addresses"].values()
    assert cpu != other == first == second
    told = found["commands"]
    names = ["dau-smoke-digits-other", "online-fully-connected-digits", "online-fully-connected-digits-other"]
    assert sorted(told["files"]) == sorted(f"{name}.json" for name in names)
    assert set(told["settings"]) == {"", "other"}


def test_the_check_runs_there(found):
    assert found["commands"]["check"] == 0
    outcomes = {(row["backend"], row["case"]): row["outcome"] for row in found["check"]["agreement"]}
    assert set(outcomes.values()) == {OK, DECLINED}
    assert all(outcomes["plain", case] == OK for case in [*CASES, *SEQUENCES])
    assert all(row["ratio"] > 0 for row in found["check"]["times"] if not row["compiled"])
    assert found["commands"]["waits"] > 0


# Several processes


def test_a_message_is_made_and_used_where_the_layers_are(ranks):
    """As NCCL wants it: one per update, nothing of the CPU in it, and nobody waits for a number."""
    for found in ranks:
        first, *later = found["other"][0]["work"]
        assert [name for name, _ in first["sent"]] == ["c10d::allreduce_"] * 3  # layers, and sizes, are compared once
        for work in later:
            assert [name for name, _ in work["sent"]] == ["c10d::allreduce_"]
            assert work["reads"] == 0
            assert work["moved"] == []


def test_the_device_would_have_noticed(ranks):
    assert all("as in NCCL" in found["refused"] for found in ranks)


def test_windows_merge_there_as_on_the_cpu(ranks):
    """To the last bit, and alike in both processes."""
    for one, two in zip(*(found["other"][0]["states"] for found in ranks), strict=True):
        streamed = [name for name in one if name.split(".")[-1] in FIELDS]
        assert len(streamed) >= 4 * len(FIELDS)
        assert all(torch.equal(one[name], two[name]) for name in streamed)
    for found in ranks:
        for here, there in zip(found["cpu"][0]["states"], found["other"][0]["states"], strict=True):
            assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_skipped_step_is_known_to_the_device_alone(ranks):
    for found in ranks:
        for here, there in zip(found["cpu"][1], found["other"][1], strict=True):
            assert all(torch.equal(here["state"][name], there["state"][name]) for name in here["state"])
        counts = [int(each["state"]["stats_count"]) for each in found["other"][1]]
        assert counts[1] < counts[2]
        assert [each["reads"] for each in found["other"][1][1:]] == [0, 0]


def test_layers_that_differ_are_named_there_too(ranks):
    for found in ranks:
        assert "p=1.0 (rank 0), p=2.0 (rank 1)" in found["different"]
