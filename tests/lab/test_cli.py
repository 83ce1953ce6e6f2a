"""The command line: every figure at smoke scale, what it prints and writes, interruptions, and bad command lines."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from itertools import product
from pathlib import Path

import pytest
from lab_results import assert_refused, results
from processes import is_alive, wait_for, workers_of

import streamnorm
from streamnorm.lab.cli import main
from streamnorm.lab.experiment import duration
from streamnorm.lab.figures import FIGURES
from streamnorm.lab.jobs import Loader, seconds
from streamnorm.lab.results import read_folder
from streamnorm.lab.scales import QUICK, SMOKE, scaled
from streamnorm.lab.view.endings import table

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "streamnorm"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def all_figures(tmp_path_factory, text_file):
    """A folder with the results of every figure."""
    out = tmp_path_factory.mktemp("all")
    data = ["--data", "digits", "--data", str(text_file)]
    assert main(["run", "all", "--preset", "smoke", *data, "--out", str(out)]) == 0
    return out


def test_every_figure_runs(all_figures):
    found = {each.figure.name: each for each in read_folder(all_figures)}
    assert set(found) == set(FIGURES)
    for name, each in found.items():
        assert list(each.curves) == [curve.label for curve in FIGURES[name].curves]
        for label, runs in each.curves.items():
            alone = label in ("BN 1 x 32", "Online: BN", "Online: TSBN")
            assert [run["outcome"] for run in runs] == ["refused" if alone else "finished"], (name, label)
        stem = all_figures / each.file_name
        assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in stem.with_suffix(".svg").read_text(encoding="utf-8")
        assert each.command.startswith("streamnorm run all --preset smoke")
    runs = {path.name for path in (all_figures / "runs").iterdir()}
    used = {run["id"] for each in found.values() for curve in each.curves.values() for run in curve}
    assert runs == used


def test_what_was_trained_is_not_trained_again(all_figures, text_file, capsys):
    data = ["--data", "digits", "--data", str(text_file)]
    before = {path: path.stat().st_mtime_ns for path in all_figures.glob("runs/*/result.json")}
    assert main(["run", "online", "rnn", "--preset", "smoke", *data, "--out", str(all_figures)]) == 0
    assert {path: path.stat().st_mtime_ns for path in all_figures.glob("runs/*/result.json")} == before
    output = capsys.readouterr()
    assert "to train" not in output.err
    assert "%" not in output.err.replace("100 %", "")  # no progress bar: nobody looks
    assert re.search(r"streaming 1 x 32 +\d\.\d{3} +\d+\.\d +\d+\.\d{3} +\d+\.\d", output.out)
    assert "BN 1 x 32" in output.out
    assert "refused" in output.out
    assert "not enough evidence" in output.out
    for name, kind in product(("online-smoke-digits", "rnn-smoke-text"), ("json", "png", "svg")):  # what it wrote
        assert str(all_figures / f"{name}.{kind}") in output.out.splitlines()


def test_the_report(all_figures, capsys):
    assert main(["report", "--out", str(all_figures)]) == 0
    page = (all_figures / "report.html").read_text(encoding="utf-8")
    for figure in FIGURES.values():
        assert figure.title in page
    assert page.count("<img") == len(FIGURES)
    assert str(all_figures / "report.html") in capsys.readouterr().out


INSTALLED = Path(sys.executable).parent / "streamnorm"


@pytest.mark.skipif(not INSTALLED.exists(), reason="runs from its sources here")
def test_the_installed_command_tells_its_version():
    done = subprocess.run([INSTALLED, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"streamnorm {streamnorm.__version__}\n"


def test_list(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{figure.name} " in listed and figure.paper in listed for figure in FIGURES.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "olnine"], ["no figure called 'olnine'", "online"]),
        (["run"], ["FIGURE"]),
        (["walk"], ["walk", "run"]),
        ([], ["COMMAND"]),
        (["run", "online", "--preset", "huge"], ["huge", "smoke", "quick"]),
        (["run", "online", "--seeds", "0"], ["'0'", "1 or more"]),
        (["run", "online", "--jobs", "two"], ["'two'", "whole number"]),
        (["run", "online", "--data-dir", "nowhere"], ["nowhere does not exist"]),
        (["run", "online", "--data-dir", "odd"], ["no CIFAR-10 in odd", "cifar-10-batches-bin"]),
        (["run", "rnn", "--data", "missing.txt"], ["missing.txt", "path of a text file"]),
        (["run", "online", "--data", "shakespeare"], ["online learns from images", "digits"]),
        (["run", "rnn", "--data", "digits"], ["rnn learns from text", "shakespeare"]),
        (["run", "online", "--data", "digits", "--out", "file/inside"], ["cannot write file/inside", "another place"]),
        (["report", "--out", "empty"], ["no results in empty", "streamnorm run"]),
        (["report", "--out", "odd"], ["odd.json is no result of streamnorm"]),
        (["report", "--out", "broken"], ["broken.json cannot be read"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_command_lines_end_with_one_line_and_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name, content in (("odd", '{"figure": "no such"}'), ("broken", '{"figure":')):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(content, encoding="utf-8")
    assert_refused(arguments, words, capsys)


@pytest.mark.parametrize(
    ("package", "arguments", "works"),
    [("matplotlib", ["run", "dau", "--data", "digits"], False), ("sklearn", ["run", "dau", "--data", "digits"], False),
     ("matplotlib", ["list"], True), ("tqdm", ["run", "dau", "--data", "digits", "--preset", "smoke"], True)],
)  # fmt: skip
def test_a_missing_extra_is_named_before_the_work(package, arguments, works, tmp_path):
    hidden = tmp_path / "hidden" / package
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')", encoding="utf-8")
    environment = ONE_THREAD | {"PYTHONPATH": str(tmp_path / "hidden")}
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == (0 if works else 2), done.stderr
    if not works:
        assert len(done.stderr.splitlines()) == 1
        assert 'pip install "streamnorm[lab]"' in done.stderr
        assert not list(tmp_path.glob("results/runs/*"))


def start(*arguments, **options):
    """The command in a process of its own, which Ctrl-C reaches: started in the background, it would be ignored."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here is ignored there
    try:
        return subprocess.Popen([*COMMAND, *map(str, arguments)], env=ONE_THREAD, **pipes, **options)
    finally:
        signal.signal(signal.SIGINT, old)


ONLINE = ["run", "online", "--preset", "smoke", "--data", "digits", "--jobs", "2"]


MORE = [*ONLINE, "--seeds", 50]  # than it has time for before it is stopped


def same_curves(out, all_figures):
    """What was trained into `out`, with whatever came between, is what was trained without."""
    (here,), there = read_folder(out), {each.figure.name: each for each in read_folder(all_figures)}["online"]
    for label, (run,) in here.curves.items():
        for name, values in run["curves"].items():
            assert values == pytest.approx(there.curves[label][0]["curves"][name], rel=1e-3, nan_ok=True), (label, name)


def test_several_processes_give_the_same_and_survive_interrupts(all_figures, tmp_path):
    """Two workers, and Ctrl-C as a terminal sends it, to all of them; then it ends as without."""
    out = tmp_path / "out"
    first = start(*MORE, "--out", out, start_new_session=True)
    wait_for(lambda: len(list(out.glob("runs/*"))) > 1, first)
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate(timeout=300)
    assert first.returncode == 130, errors
    assert "the same command goes on from here" in errors
    assert "Traceback" not in errors

    again = start(*ONLINE, "--out", out)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    same_curves(out, all_figures)


def test_a_killed_worker_is_named_and_its_run_gone_on_with(all_figures, tmp_path):
    process = start(*MORE, "--out", tmp_path)
    workers = wait_for(lambda: workers_of(process.pid), process)  # asked once: they may be others a moment later
    assert workers, process.communicate()
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert "a worker ended with exit code -9: run the same command again to go on" in errors
    assert "Traceback" not in errors
    assert not any(map(is_alive, workers))
    assert main([*ONLINE[:-2], "--out", str(tmp_path)]) == 0
    same_curves(tmp_path, all_figures)


def test_sigterm_to_the_parent_is_heeded_like_ctrl_c(all_figures, tmp_path):
    """As a system that shuts down sends it, to one process: its workers end too, each after saving its run."""
    process = start(*MORE, "--out", tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("runs/*"))) > 1, process)
    workers = workers_of(process.pid)
    process.terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "the same command goes on from here" in errors
    assert "Traceback" not in errors
    assert len(workers) == 2
    assert not any(map(is_alive, workers))
    assert main([*ONLINE[:-2], "--out", str(tmp_path)]) == 0
    same_curves(tmp_path, all_figures)


def test_on_a_terminal_there_is_a_progress_bar(tmp_path):
    """Without colours, where they are not wanted."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))  # rows, columns
    command = [*COMMAND, "run", "rnn", "--preset", "smoke", "--data", ROOT / "README.md"]
    environment = ONE_THREAD | {"NO_COLOR": "1", "TQDM_COLOUR": "red"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    text = shown.decode()
    assert process.wait(timeout=300) == 0, text
    assert "3 runs to train, 0 done before" in text
    assert re.search(r"about \d+ (s|min|h) in 1 process", text)
    assert text.index("about ") < text.index("runs   0%")
    assert re.search(r"\d+%\|.*\| \d\d:\d\d < .* updates/s, loss \d\.\d{3}", text), text
    assert not re.search(r"\x1b\[[\d;]*m", text)


def test_the_estimate_grows_with_the_work(text_file):
    load = Loader()
    run = FIGURES["online"]["streaming 32 x 1"]
    short, long = scaled(run, SMOKE, "digits"), scaled(run, QUICK, "digits")
    assert 0 < seconds(short, load) < seconds(long, load)
    assert seconds(scaled(FIGURES["online"]["BN 1 x 32"], SMOKE, "digits"), load) == 0  # cannot run


def test_durations():
    assert [duration(length) for length in (3, 89, 600, 5399, 7200)] == ["3 s", "89 s", "10 min", "90 min", "2.0 h"]


def test_the_table_shows_means_and_standard_errors(tmp_path):
    made = results("dau", seeds=2)
    for run, end in zip(made.curves["2 x 1"], (0.25, 0.75), strict=True):
        run["curves"]["test_error"][-1] = end
    row = next(line for line in table(made).splitlines() if line.startswith("2 x 1 "))
    assert "50.0 ± 25.0" in row


def test_results_can_be_read_back(tmp_path):
    made = results("table", seeds=2)
    path = made.write(tmp_path)
    assert path.name == "table-quick.json"
    assert read_folder(tmp_path) == [made]
    assert json.loads(path.read_text(encoding="utf-8"))["figure"] == "table"
