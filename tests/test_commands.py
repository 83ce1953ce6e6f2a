"""Every command, script and make target that the documents name is run by a test, far enough to know that it works."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from makefile import ROOT, has_make, recipe, run_line

from streamnorm.lab import cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
# Which test runs it.
RUN_BY = {
    "benchmarks/averaging.py": "test_docs.py::test_the_benchmark_of_averages_runs",
    "benchmarks/bench.py": "test_docs.py::test_the_benchmark_of_cost",
    "benchmarks/cases.py": "test_docs.py::test_every_case_of_the_benchmark_runs",
    "benchmarks/closer.py": "test_docs.py::test_the_comparison_is_looked_at_more_closely",
    "benchmarks/divergence.py": "test_docs.py::test_a_training_is_watched_from_inside",
    "benchmarks/evaluation.py": "test_docs.py::test_a_memory_for_evaluation_is_measured",
    "benchmarks/finetune.py": "test_docs.py::test_a_converted_network_is_trained_on_and_tested_three_ways",
    "benchmarks/references.py": "test_docs.py::test_what_each_reference_costs_is_measured",
    "benchmarks/without_guard.py": "test_docs.py::test_the_comparison_without_the_guard_is_measured",
    "benchmarks/gains.py": "test_docs.py::test_what_gains_begin_with_is_measured",
    "benchmarks/own_gradient.py": "test_docs.py::test_the_share_of_a_batch_s_own_gradient_is_measured",
    "benchmarks/tasks.py": "test_docs.py::test_a_stream_of_tasks_is_measured",
    "benchmarks/weights.py": "test_docs.py::test_what_is_done_to_the_weights_is_measured",
    "benchmarks/gpu_kernels.py": "test_triton.py::test_every_kernel_compiles_for_every_target",
    "benchmarks/loop.py": "test_docs.py::test_every_case_of_the_benchmark_runs",
    "benchmarks/messages.py": "test_commands.py::test_the_count_of_messages",
    "benchmarks/nets.py": "test_docs.py::test_every_case_of_the_benchmark_runs",
    "benchmarks/plot.py": "test_commands.py::test_the_figures_of_the_benchmark",
    "benchmarks/sequence_length.py": "test_docs.py::test_the_benchmark_of_sequence_length",
    "benchmarks/standardize.py": "test_standardize.py::test_the_benchmark",
    "examples/char_model.py": "test_docs.py::test_the_character_model_goes_on_where_it_stopped",
    "examples/digits.py": "test_docs.py::test_the_demo",
    "examples/distributed.py": "test_distributed.py::test_the_loss_of_a_worker_changes_nothing",
    "examples/online_stream.py": "test_online_stream.py::test_it_runs_and_writes",
    "examples/regression_stream.py": "test_regression_stream.py::test_it_runs_and_writes",
    "examples/stream_q.py": "test_stream_q.py::test_it_runs_and_writes",
    "tools/docstrings.py": "test_docstrings.py::test_what_is_described_elsewhere_is_shown_here",
    "tools/hooks.py": "test_site.py::test_every_link_leads_somewhere",
    "tools/pictures.py": "test_commands.py::test_pictures_are_drawn_again",
    "tools/tutorial.py": "test_tutorial.py::test_it_runs_and_says_the_same",
    "tests/fuzz.py": "test_commands.py::test_a_case_of_the_fuzz_is_tried_again",
    "tests/stress_threads.py": "test_threads.py::test_training_and_reading_at_once_does_not_crash",
    "make": "test_commands.py::test_make_alone_is_the_demo",
    "make bench": "test_docs.py::test_the_benchmark_of_cost",
    "make clean": "test_commands.py::test_make_clean",
    "make dist": "test_dist.py::test_make_dist",
    "make docs": "test_site.py::test_every_shelf_is_there",
    "make demo": "test_docs.py::test_the_demo",
    "make lint": "test_commands.py::test_make_test",
    "make test": "test_commands.py::test_make_test",
    "make test-integrations": "test_commands.py::test_make_test_integrations",
    "make test-sanitized": "test_commands.py::test_make_test_sanitized",
    "streamnorm bench-online": "lab/test_grid.py::test_every_distinct_run_is_trained_once",
    "streamnorm check": "lab/test_check.py::test_the_command",
    "streamnorm compare": "lab/test_compare.py::test_the_command_trains_to_a_table",
    "streamnorm list": "lab/test_cli.py::test_list",
    "streamnorm report": "lab/test_cli.py::test_the_report",
    "streamnorm run": "lab/test_cli.py::test_every_figure_runs",
}


def spans():
    """Commands as the documents print them: in code spans, and the lines of blocks that are not Python."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences if not language.startswith("python")]
    lines = [line.split("  #")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split(";")]
    return [*parts, *(part.strip() for span in re.findall(r"`([^`\n]+)`", rest) for part in span.split(";"))]


def test_whatever_is_named_is_run():
    """And every benchmark and example that there is, named or not."""
    named = set(re.findall(r"\b(?:benchmarks|examples|tools)/\w+\.py\b", TEXT))
    named |= {
        path.relative_to(ROOT).as_posix()
        for kind in ("benchmarks", "examples", "tools")
        for path in (ROOT / kind).glob("*.py")
        if "__main__" in path.read_text(encoding="utf-8")  # the others are what scripts share
    }
    for span in spans():
        words = span.split()
        if words[:1] == ["make"]:
            named |= {f"make {word}".strip() for word in words[1:] or [""] if "=" not in word}
        elif words[:1] == ["streamnorm"] and len(words) > 1:
            named.add(f"streamnorm {words[1]}")
        elif words[:1] == ["python"] and len(words) > 1 and words[1].startswith("tests/"):
            named.add(words[1])
    assert {"make bench", "streamnorm run", "tests/fuzz.py"} <= named
    assert named - set(RUN_BY) == set(), "no test runs it"


@pytest.mark.skipif(not has_make, reason="reads the Makefile")
def test_every_target_is_run():
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"make {name}" for name in phony[1].split()} <= set(RUN_BY)


@pytest.mark.parametrize("name", sorted(set(RUN_BY.values())))
def test_the_tests_of_the_table_exist(name):
    file, test = name.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# The command lines of the documents

SCRIPT = r"(?:python|torchrun(?: --[\w-]+ \d+)*) ((?:benchmarks|examples|tests|tools)/\w+\.py)(.*)"


def source(script):
    """Of a script and of what it imports from its own folder, where options may be shared."""
    text = script.read_text(encoding="utf-8")
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)]
    return "\n".join([text, *(source(path) for path in beside if path.exists() and path != script)])


def test_options_that_are_named_exist():
    """Of scripts, and the cases that the benchmark is asked for."""
    found = [re.fullmatch(SCRIPT, span) for span in spans()]
    found = [match for match in found if match]
    assert len(found) >= 6
    for match in found:
        text = source(ROOT / match[1])
        for option in re.findall(r"--[a-z][\w-]*", match[2]):
            assert f'"{option}"' in text, f"{match[1]} has no {option}"
        case = re.search(r"bench\.py.* --only (\S+)", match[0])
        if case:
            assert re.search(
                rf'"{re.escape(case[1])}[/"]', (ROOT / "benchmarks/cases.py").read_text(encoding="utf-8")
            ), match[0]


def test_command_lines_are_understood(capsys):
    lines = {span for span in spans() if re.match(r"streamnorm (run|report|list|check|bench-online|compare)\b", span)}
    assert len(lines) >= 8
    for line in sorted(lines):
        words = ["." if word.isupper() else word for word in shlex.split(line)[1:]]
        words = [word for word in words if word not in ("...", "…")]
        if words == ["run"]:  # named without a figure
            continue
        try:
            cli.parser().parse_args(words)
        except SystemExit as refused:
            raise AssertionError((line, capsys.readouterr().err)) from refused


# Scripts


def test_the_count_of_messages():
    """What it prints is what docs/guide/distributed.md has."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append("benchmarks/messages.py")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 3
    page = (ROOT / "docs/guide/distributed.md").read_text(encoding="utf-8")
    for batches, ours, our_bytes, theirs, their_bytes in rows:
        assert f"| {batches} | {ours}, {our_bytes} | {theirs}, {their_bytes} |" in page


def test_the_figures_of_the_benchmark(tmp_path, monkeypatch):
    shutil.copy(ROOT / "benchmarks/results/results.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path)])
    names = runpy.run_path(str(ROOT / "benchmarks/plot.py"), run_name="__main__")
    rows = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]
    figures = names["parted"]([row for row in rows if row["kind"] != "growth"])
    assert sum(map(len, figures.values())) == sum(row["kind"] != "growth" for row in rows) > 0
    for each in figures.values():
        assert len(names["lines_of"](each)) <= 36  # a page
    assert {(row["case"], row["against"]) for row in rows} >= set(names["HEADLINES"])
    for name in ("headline", *figures, "growth"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (ROOT / f"benchmarks/results/{name}.png").exists()


def test_pictures_are_drawn_again(tmp_path, monkeypatch, capsys):
    import pictures

    for name in ("compare-resnet-8", "online-recurrent", "lp-quick"):
        shutil.copy(ROOT / f"docs/results/{name}.json", tmp_path)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    for start in ("compare-", "online-", "lp-"):
        monkeypatch.setattr(sys, "argv", ["pictures.py", start])
        pictures.main()
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix != ".json"}
    assert drawn == set(capsys.readouterr().out.split())
    assert len(drawn) == 6


def test_a_case_of_the_fuzz_is_tried_again():
    command = [sys.executable, "tests/fuzz.py", "--case", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "calls" in done.stdout + done.stderr


# Make

needs_make = pytest.mark.skipif(not has_make, reason="there is no make")


def well(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_make
def test_make_alone_is_the_demo():
    assert recipe("") == recipe("demo") == [f"{sys.executable} examples/digits.py"]


@needs_make
def test_make_sets_up_an_environment_with_the_torch_that_is_asked_for(tmp_path):
    lines = recipe("test", "TORCH=torch==2.4.1", f"VENV={tmp_path}/new", ready=())
    assert f"-m venv {tmp_path}/new" in lines[0]
    assert "pip>=25.1" in lines[1]  # the one that comes with Python may not know groups
    assert "torch==2.4.1" in lines[2]
    assert lines[-1] == recipe("test")[-1]


@needs_make
def test_make_test():
    """Lint as `make lint`, then all tests; each tool is tried on one file."""
    lines = recipe("test")
    assert lines[:-1] == recipe("lint")
    check, layout, types, tests = lines
    for line in (check, layout):
        well(run_line(line.removesuffix(" ."), "tests/makefile.py"))
    assert types.endswith("-m mypy")
    well(run_line(types, "--version"))
    assert "test_options_that_are_named" in well(
        run_line(tests, "-n", 0, "--collect-only", "tests/test_commands.py", "-vv")
    )


@needs_make
def test_make_test_integrations():
    """Their packages are not in this environment: that the files are found and can be read is as far as it goes.

    The command that tries the models is run in test_models.py, with models of torch.
    """
    line, models = recipe("test-integrations")
    assert models.endswith("-m integrations.models ")
    folder = ROOT / line.rpartition(" ")[2]
    assert line.endswith(f"-m pytest {folder.relative_to(ROOT)}")
    tests = sorted(folder.glob("test_*.py"))
    assert len(tests) >= 4
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "streamnorm":
                module = __import__(node.module, fromlist=["*"])
                assert all(hasattr(module, alias.name) for alias in node.names), path


@needs_make
def test_make_clean(tmp_path):
    """What was made goes, what was written stays; in a copy."""
    made = [
        *("build/x", "dist/x", ".venv/x", ".venv-integrations/x", ".mypy_cache/x", ".ruff_cache/x", ".pytest_cache/x"),
        *(
            "src/streamnorm.egg-info/x",
            "src/streamnorm/nn/__pycache__/x.pyc",
            "src/streamnorm/backends/cpu/_native.abi3.so",
        ),
    ]
    written = ["src/streamnorm/nn/base.py", "src/streamnorm/backends/cpu/module.cpp", "tests/test_docs.py"]
    for name in [*made, *written]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    shutil.copy(ROOT / "Makefile", tmp_path)
    well(subprocess.run(["make", "clean"], capture_output=True, text=True, cwd=tmp_path))
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*written, "Makefile"}


def sanitizers():
    try:
        library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return False
    return sys.platform == "linux" and Path(library).is_absolute()


@needs_make
@pytest.mark.skipif(not sanitizers(), reason="needs gcc and its sanitizers")
def test_make_test_sanitized(tmp_path):
    """Built, imported, and a few calls made; the tests that it runs are collected."""
    clear, build, imported, *tests, fuzz, threads = recipe("test-sanitized", f"SANITIZED={tmp_path}/made", "CALLS=40")
    assert clear == f"rm -rf {tmp_path}/made"
    well(run_line(build))
    well(run_line(imported))
    for name in re.findall(r"tests/\S+\.py", " ".join([*tests, fuzz, threads])):
        assert (ROOT / name).exists(), name
    assert all("pytest tests/test_" in line for line in tests)
    well(run_line(fuzz))
    assert threads.endswith("tests/stress_threads.py")  # see test_threads.py
