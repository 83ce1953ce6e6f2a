"""Runs on a cluster: a real scheduler and real workers, processes of this machine that are killed and misled."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lab_results import assert_refused
from processes import wait_for

from streamnorm.lab import experiment, jobs, remote
from streamnorm.lab.cli import main
from streamnorm.lab.cluster import Cluster
from streamnorm.lab.data import load_images
from streamnorm.lab.errors import JobError
from streamnorm.lab.experiment import run_figure
from streamnorm.lab.figures import FIGURES, STREAMING_RECURRENT
from streamnorm.lab.jobs import Loader, run_all
from streamnorm.lab.runs import Norm, Run
from streamnorm.lab.scales import SMOKE
from streamnorm.lab.train import load_checkpoint, train

with pytest.MonkeyPatch.context() as patch:  # an example of that name would be found first
    patch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "examples"])
    pytest.importorskip("distributed")

RUN = Run(
    "A", STREAMING_RECURRENT, samples=4, batches=2, width=8, rates=((0.1, 4),), data="digits", train_size=1200,
    test_size=32, evaluate=20,
)  # fmt: skip
# In every worker: a line for each training, with its process and where it begins; and what the files beside it ask for.
PRELOAD = """
import os
import sys
from pathlib import Path
from streamnorm.lab import remote, train

sys.modules["tensorboard"] = None  # it takes long to import
here = Path(os.environ["TOLD_BY"])

def watched(self, report, every, stopped, go_on=train.Training.go_on):
    with (here / "begun").open("a") as file:
        file.write(f"{os.getpid()} {self.done}\\n")
    go_on(self, report, 0.1 if (here / "often").exists() else every, stopped)

def is_shared(order, before=remote.is_shared):
    return before(order) and not (here / "apart").exists()

def versions(before=train.versions):
    return before() | ({"torch": "0.4"} if (here / "old").exists() else {})

if not hasattr(train, "is_watched"):  # once: a worker does this twice
    train.is_watched = True
    train.Training.go_on, remote.is_shared = watched, is_shared
    train.versions = remote.versions = versions
"""


class Running:
    """A scheduler and three workers; `folder` is where they are told of what to do."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        (folder / "preload.py").write_text(PRELOAD, encoding="utf-8")
        told = folder / "scheduler.json"
        scheduler = self.start("scheduler", "--port", "0", "--scheduler-file", told)
        wait_for(told.exists, scheduler)
        self.address = json.loads(told.read_text(encoding="utf-8"))["address"]
        for _ in range(3):
            self.worker()

    def start(self, kind, *options):
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--host", "127.0.0.1", "--no-dashboard"]
        with (self.folder / "log").open("a", encoding="utf-8") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOLD_BY": str(self.folder)}
            process = subprocess.Popen([*command, *map(str, options)], stdout=log, stderr=log, env=environment)
        self.processes.append(process)
        return process

    def worker(self, threads=1):
        options = ["--nthreads", threads, "--no-nanny", "--preload", self.folder / "preload.py"]
        return self.start("worker", self.address, *options, "--local-directory", self.folder)

    def begun(self):
        """Of all trainings: the process, and the updates that it began with."""
        return [
            tuple(map(int, line.split())) for line in (self.folder / "begun").read_text(encoding="utf-8").splitlines()
        ]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("cluster"))
    yield running
    for process in reversed(running.processes):
        process.kill()
        process.wait()


@pytest.fixture
def running(started):
    """With nothing asked for, and nothing begun: the last test may have stopped runs that take a moment to end."""
    for name in ("often", "old", "apart"):
        (started.folder / name).unlink(missing_ok=True)
    with Cluster(started.address) as carrier:
        run = partial(carrier.client.run, on_error="ignore")  # of workers that a test has just killed
        wait_for(lambda: not any(run(lambda dask_worker: len(dask_worker.state.tasks)).values()), started.processes[0])
    (started.folder / "begun").write_text("", encoding="utf-8")
    return started


@pytest.fixture(scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(one_thread, tmp_path_factory):
    """How the run ends without a cluster."""
    return train(RUN, load_images("digits"), tmp_path_factory.mktemp("alone"))


def same(one, other):
    return one | {"seconds": 0} == other | {"seconds": 0}


class Watch:
    """Does something once, when a run has made a few updates."""

    def __init__(self, act=lambda: None):
        self.act, self.heard, self.ended = act, [], []

    def advance(self, i, done, total, loss):
        first = not self.heard
        self.heard.append(done)
        if first:
            assert 0 < done < total, "it ended too early to be stopped"
            self.act()

    def end(self, i):
        self.ended.append(i)


def carried(running, root, watch, run=RUN):
    with Cluster(running.address) as carrier:
        (result,) = run_all([run], Loader(), root, carrier, watch)
    return result


def results(out):
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("runs/*/result.json")}


def test_a_figure_is_the_same_to_the_last_bit(running, one_thread, tmp_path, monkeypatch, capsys):
    """One run of it is refused, as a result."""
    monkeypatch.setattr(jobs, "MEASURED_SECONDS", 1e-3)
    run_figure(FIGURES["online"], SMOKE, tmp_path / "here", data=["digits"])
    command = ["run", "online", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path / "there")]
    assert main([*command, "--cluster", running.address]) == 0
    here, there = results(tmp_path / "here"), results(tmp_path / "there")
    assert here.keys() == there.keys()
    assert len(here) == 7
    assert all(same(here[run], there[run]) for run in here)
    assert "refused" in {result["outcome"] for result in there.values()}
    assert len(running.begun()) == 7
    assert "as fast as this machine" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "there/runs").iterdir()} == set(there)  # no mark is left


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
def test_the_run_of_a_killed_worker_goes_on_elsewhere(apart, running, alone, tmp_path):
    """From its checkpoint if the folder is shared, from the beginning if not; with the same end."""
    (running.folder / "often").touch()
    if apart:
        (running.folder / "apart").touch()
    watch = Watch(lambda: os.kill(running.begun()[-1][0], signal.SIGKILL))
    result = carried(running, tmp_path, watch)
    (first, start), (second, resumed) = running.begun()
    assert (first != second, start) == (True, 0)
    assert (resumed == 0) is apart
    assert same(result, alone)
    assert watch.ended == [0]
    assert json.loads((tmp_path / result["id"] / "result.json").read_text(encoding="utf-8")) == result
    assert (tmp_path / result["id"] / "metrics.jsonl").exists() != apart  # trained in the folder or elsewhere


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_saves_and_goes_on(number, running, alone, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        carried(running, tmp_path, Watch(lambda: signal.raise_signal(number)))
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")  # no other than that of the stop
    done = load_checkpoint(checkpoint)["done"]
    assert done > 0
    assert same(carried(running, tmp_path, Watch()), alone)
    assert [start for _, start in running.begun()] == [0, done]


def test_a_run_that_nobody_waits_for_any_more_is_saved_and_stopped(running, tmp_path):
    """As after the death of the command, which cannot ask for it."""
    long = replace(RUN, rates=((0.1, 400),))
    with Cluster(running.address) as carrier, pytest.raises(JobError, match="is gone"):
        run_all([long], Loader(), tmp_path, carrier, Watch(carrier.client.close))
    assert wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), running.processes[0])


def test_ctrl_c_ends_the_command_as_always(running, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiment.Bar, "advance", lambda *news: signal.raise_signal(signal.SIGINT))
    command = ["run", "dau", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path)]
    assert main([*command, "--cluster", running.address]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err


# What is refused


def test_other_versions_are_refused(running, tmp_path, monkeypatch, capsys):
    """Before the work, and by a worker that comes later."""
    (running.folder / "old").touch()
    words = [f"has torch 0.4, not {torch.__version__}: install the same there"]
    command = ["run", "dau", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path)]
    assert_refused([*command, "--cluster", running.address], words, capsys)
    monkeypatch.setattr(Cluster, "_check_workers", lambda self: None)
    with pytest.raises(JobError, match=r"has torch 0\.4"):
        carried(running, tmp_path, Watch())
    assert not running.begun()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (replace(RUN, samples=2400, batches=1), r"1200 training images make no update of 2400.* \(on worker tcp:"),
        (
            replace(RUN, norm=Norm("streaming", ref="BA9")),
            r"ended with ValueError: .*BA9.*; the log of the worker has more \(on worker",
        ),
    ],
    ids=["of ours", "of others"],
)
def test_errors_of_a_run_come_back(run, words, running, tmp_path):
    with pytest.raises(JobError, match=words):
        carried(running, tmp_path, Watch(), run)


def test_data_that_is_missing_or_other_there(running, tmp_path):
    order = remote.Order(RUN, "another", RUN.data, None, tmp_path, "none", remote.agreed(), "", 0)
    images = replace(order, run=replace(RUN, data="cifar10"), source="cifar10", folder=tmp_path)
    with Cluster(running.address) as carrier:
        _, other = carrier.client.submit(remote.train_there, order).result()
        _, missing = carrier.client.submit(remote.train_there, images).result()
    assert "digits is other data than where the run was asked for: put the same there (on worker tcp:" in other
    assert f"no CIFAR-10 in {tmp_path}: it must hold one of" in missing


NOBODY = """
import sys
from streamnorm.lab import cluster
from streamnorm.lab.cli import main
cluster.CONNECT_SECONDS = 0.3
*command, one, two, three = sys.argv[1:]
print([main([*command, address]) for address in (one, two, three)])
"""


def test_no_scheduler(tmp_path):
    """In a process of its own: late in one that ran other tests, Dask may wait in vain for its thread to begin."""
    addresses = ["tcp://127.0.0.1:9", "127.0.0.1", "no such:thing"]
    command = ["run", "dau", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path), "--cluster"]
    script = [sys.executable, "-c", NOBODY, *command, *addresses]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[2, 2, 2]\n", done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("streamnorm: ")]
    assert len(said) == 3
    for address, line in zip(addresses, said, strict=True):
        assert f"no scheduler at {address} (" in line
        assert "dask scheduler" in line
    assert not list(tmp_path.iterdir())


def test_a_missing_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    command = ["run", "dau", "--data", "digits", "--out", str(tmp_path), "--cluster", "localhost:8786"]
    assert_refused(command, ['pip install "streamnorm[cluster]"'], capsys)


@pytest.mark.parametrize("command", [["run", "dau"], ["bench-online"], ["compare"]], ids=lambda words: words[0])
def test_processes_or_a_cluster(command, capsys):
    assert_refused([*command, "--jobs", "1", "--cluster", "localhost:8786"], ["not allowed with", "--jobs"], capsys)


# Last, for they take away the workers, and the scheduler


def test_without_workers_it_waits_and_says_so(running, tmp_path):
    """And goes on with one that comes; this one has two threads, and is refused."""
    for process in running.processes[1:]:
        process.kill()
        process.wait()
    said = []
    with Cluster(running.address, lambda line: said.append((line, running.worker(threads=2)))) as carrier:
        assert carrier.room(3).at_once == 1
        with pytest.raises(JobError, match="has 2 threads, must have 1: start it with --nthreads 1"):
            run_all([RUN], Loader(), tmp_path, carrier, Watch())
    ((line, worker),) = said
    assert line.startswith(f"no workers at {running.address}: waiting for one; start it with: dask worker ")
    worker.kill()


def test_a_scheduler_that_ends(running, tmp_path):
    with (
        Cluster(running.address, lambda line: running.processes[0].kill()) as carrier,
        pytest.raises(JobError, match=r"the scheduler at .* is gone: start it and its workers"),
    ):
        run_all([RUN], Loader(), tmp_path, carrier, Watch())
