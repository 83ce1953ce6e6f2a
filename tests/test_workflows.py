"""The workflows, forms and hooks say what is true of the project; what checks them without a network is run."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from makefile import ROOT, has_make, recipe, run_line

import streamnorm

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TORCH = re.search(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)[1]


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands():
    """Every line that the workflows run."""
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            for step in job.get("steps", []):
                yield from step.get("run", "").splitlines()


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.github-issue-forms", [path for path in FORMS if path.name != "config.yml"]),
        ("vendor.github-issue-config", [path for path in FORMS if path.name == "config.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_they_have_the_form_that_is_asked_for(schema, paths):
    pytest.importorskip("check_jsonschema")
    assert paths
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="there is no actionlint")
def test_actionlint():
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_they_run_exists():
    targets = set(re.search(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)[1].split())
    made = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"test", "test-integrations", "docs", "dist"} <= made
    assert made <= targets
    named = {name for line in commands() for name in re.findall(r"\btests/\w+\.py\b", line)}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
    cibuildwheel = PROJECT["tool"]["cibuildwheel"]
    assert (ROOT / cibuildwheel["test-command"].split("{project}/")[1]).exists()


def test_every_python_and_torch_that_the_project_names_is_tried():
    """The oldest of both, the one of the Makefile, and the newest."""
    matrix = read(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    classifiers = PROJECT["project"]["classifiers"]
    known = [found[1] for found in map(re.compile(r".*Python :: (3\.\d+)$").match, classifiers) if found]
    assert matrix["python"] == known
    assert PROJECT["project"]["requires-python"] == f">={known[0]}"
    (needed,) = PROJECT["project"]["dependencies"]
    assert matrix["torch"] == [needed.replace(">=", "=="), TORCH, "torch"]
    left = [
        pair
        for pair in itertools.product(known, matrix["torch"])
        if dict(zip(("python", "torch"), pair, strict=True)) not in matrix["exclude"]
    ]
    assert {python for python, _ in left} == set(known)
    assert {torch for _, torch in left} == set(matrix["torch"])


def test_torch_is_pinned_alike_everywhere():
    assert PROJECT["tool"]["cibuildwheel"]["test-requires"] == [TORCH]
    pinned = {found for line in commands() for found in re.findall(r"\btorch==[\w.]+", line)}
    assert pinned == {TORCH}


def test_a_wheel_of_a_release_has_its_kernels():
    """Wherever cibuildwheel builds, a failed compile is an error; tables of a system replace the common one."""
    config = PROJECT["tool"]["cibuildwheel"]
    environments = [part["environment"] for part in (config, config["linux"], config["macos"]) if "environment" in part]
    assert [environment["STREAMNORM_KERNELS"] for environment in environments] == ["1"] * len(environments)
    assert "environment" in config


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell")
@pytest.mark.parametrize(
    ("tag", "heading", "released"),
    [
        ("v{}", "## {} (2030-01-31)", True),
        ("v{}", "## {} (unreleased)", False),
        ("v{}0", "## {}0 (2030-01-31)", False),
        ("v{}", "## 9.9.9 (2030-01-31)", False),
    ],
)
def test_a_tag_is_released_if_it_is_the_version_and_has_a_date(tag, heading, released, tmp_path):
    (step,) = [
        step for step in read(ROOT / ".github/workflows/release.yml")["jobs"]["version"]["steps"] if "run" in step
    ]
    (tmp_path / "src/streamnorm").mkdir(parents=True)
    shutil.copy(ROOT / "src/streamnorm/__init__.py", tmp_path / "src/streamnorm")
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n{heading}\n".format(streamnorm.__version__), encoding="utf-8"
    )
    environment = os.environ | {"GITHUB_REF_NAME": tag.format(streamnorm.__version__)}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode == 0) == released, done.stderr


def test_only_the_step_that_publishes_may_prove_who_it_is():
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            trusted = {"id-token": "write"} if (path.stem, name) == ("release", "publish") else None
            assert job.get("permissions") == trusted, (path.name, name)
            assert "uses" in job or "timeout-minutes" in job, (path.name, name)
    assert "secrets." not in "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)


@pytest.mark.skipif(not has_make, reason="reads the Makefile")
def test_the_hooks_are_those_of_make_lint():
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = [hook["entry"].split(" -m ")[1].removesuffix(" --force-exclude") for hook in local["hooks"]]
    assert hooks == [line.split(" -m ")[1].removesuffix(" .") for line in recipe("lint")]
    for hook in local["hooks"]:
        entry = hook["entry"].replace(".venv/bin/python", sys.executable)
        done = run_line(entry, "tests/makefile.py" if hook.get("pass_filenames", True) else "--version")
        assert done.returncode == 0, done.stdout + done.stderr
