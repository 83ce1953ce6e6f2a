"""`make test-integrations` without its libraries: the checks can fail, a run goes on, the page says what was found."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from integrations.examine import Model, examine
from integrations.page import STEPS, failures, page
from integrations.zoo import LIBRARIES
from integrations.zoo.of_torch import MODELS
from makefile import ROOT
from torch import nn

from streamnorm import convert
from streamnorm.convert import rules as registry

RESULTS = json.loads((ROOT / "tests/integrations/models.json").read_text(encoding="utf-8"))


def failed(row):
    return {step for step in STEPS if not row[step]["ok"]}


@pytest.fixture(scope="module")
def rows():
    return {model.name: examine(model) for model in MODELS}


def test_models_of_plain_torch_pass(rows):
    assert not failures(rows.values())
    assert rows["vectors"]["converted"] == {"BatchNorm1d": 1}
    assert "Expected more than 1 value" in rows["vectors"]["before"]["note"]
    assert rows["vectors"]["to_batchnorm"]["note"] == "and back"
    assert rows["vectors"]["fuse"]["note"] == "1 norm folded, none left"
    assert rows["images"]["converted"] == {"BatchNorm2d": 1, "GroupNorm": 1, "LayerNorm": 1}
    assert rows["images"]["before"]["ok"]
    assert rows["images"]["fuse"]["note"].startswith("1 norm folded, 2 left: it does not follow")
    assert rows["images"]["export"]["note"].startswith("not exported before either: ")
    for step in ("evaluation", "round trip", "to_batchnorm", "fuse"):
        assert rows["images"][step]["error"] < 1e-5


class Doubled(nn.BatchNorm1d):
    """Which `convert` leaves, so one sample per batch is refused."""

    def forward(self, x):
        return 2 * super().forward(x)


class Deaf(nn.Module):
    """Whose result does not depend on its norm."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.layer(x) + 1e-6 * self.norm(x[:, :3])


def wrong(old, make):
    """A rule that loses the mean, and a little of the gain."""
    return make(
        old.num_features,
        eps=old.eps,
        weight=nn.Parameter(old.weight * 0.9),
        bias=old.bias,
        mean=old.running_mean * 0,
        var=old.running_var,
    )


def model(build):
    return Model("torch", "another", build, lambda n: torch.randn(n, 6))


def test_the_checks_can_fail(monkeypatch):
    left = examine(model(lambda: nn.Sequential(nn.Linear(6, 8), Doubled(8))))
    assert failed(left) == {"training"}
    assert left["left"]["Doubled"][0] == 1
    deaf = examine(model(Deaf))
    assert failed(deaf) == {"evaluation"}
    assert "does not depend on the norms" in deaf["evaluation"]["note"]
    monkeypatch.setattr(registry, "_registered", {})
    convert.register(nn.BatchNorm1d, wrong)
    bad = examine(MODELS[0])
    assert "evaluation" in failed(bad)
    assert bad["evaluation"]["error"] > 1e-2
    assert len(failures([left, deaf, bad])) >= 3


def test_a_run_goes_on_where_it_was(tmp_path):
    """As `make test-integrations` calls it, with the models of plain torch."""

    def run(*options):
        command = [
            sys.executable,
            "-m",
            "integrations.models",
            "--library",
            "torch",
            "--cache",
            str(tmp_path),
            *options,
        ]
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})

    first = run("--only", "vectors")
    assert first.returncode == 0, first.stderr
    assert "torch vectors: examined" in first.stderr
    assert "1 models, 0 with a failure" in first.stdout
    both = run()
    assert "torch vectors: known" in both.stderr
    assert "torch images: examined" in both.stderr
    (stored,) = tmp_path.glob("*vectors*")
    found = json.loads(stored.read_text(encoding="utf-8"))
    found["row"]["training"] |= {"ok": False, "note": "it was not seen to train"}
    stored.write_text(json.dumps(found), encoding="utf-8")
    again = run()
    assert again.returncode == 1
    assert "torch vectors: training: it was not seen to train" in again.stdout


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_results():
    assert (ROOT / "docs/measured/models.md").read_text(encoding="utf-8") == page(RESULTS)


def test_the_table_is_whole():
    rows = RESULTS["rows"]
    assert len(rows) >= 30
    assert {row["library"] for row in rows} == set(LIBRARIES)
    assert set(RESULTS["versions"]) == {"python", "torch", *LIBRARIES}
    assert len({(row["library"], row["name"]) for row in rows}) == len(rows)
    assert all(isinstance(row[step]["ok"], bool) for row in rows for step in (*STEPS, "before"))


def test_a_failure_is_shown():
    results = copy.deepcopy(RESULTS)
    results["rows"][0]["fuse"] = {"ok": False, "error": None, "note": "ValueError: no"}
    text = page(results)
    name = results["rows"][0]["name"]
    assert f"- {results['rows'][0]['library']} {name}: fuse: ValueError: no" in text
    assert "**fails**" in next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    assert f"{len(results['rows'])} models" in text
