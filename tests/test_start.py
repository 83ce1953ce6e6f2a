"""What it costs to begin: what an import brings along, what the command answers at once, and how it is stopped."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from processes import wait_for
from torch.optim import optimizer as torch_optimizer

import streamnorm
from streamnorm.engine import context, updates
from streamnorm.lab.figures import FIGURES

COMMAND = [sys.executable, "-m", "streamnorm"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SOURCE = Path(streamnorm.__file__).parent
# The files and folders of the package, and the names that files had before.
MODULES = sorted(
    {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("__")}
    | set(streamnorm._MOVED)
)


def said(code, *arguments):
    """What a new Python that runs `code` prints, as JSON."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Imports

TRAINING = """
import json, sys, torch
from torch import nn
if sys.argv[1] == "streaming":
    import streamnorm
    norm = streamnorm.StreamingNorm(3)
else:
    norm = nn.LayerNorm(3)
for _ in range(2):
    norm(torch.randn(2, 3)).sum().backward()
before = sorted(sys.modules)
torch.optim.SGD(norm.parameters(), 0.1).step()
norm(torch.randn(2, 3)).sum().backward()
print(json.dumps([before, sorted(sys.modules)]))
"""


def test_training_brings_no_compiler_along():
    """Until torch itself asks for it, which its optimizers do; and nothing of torch that a layer norm does without."""
    before, after = said(TRAINING, "streaming")
    plain_before, plain_after = said(TRAINING, "layer norm")
    assert "streamnorm.nn.streaming" in before
    assert not [name for name in before if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]
    for ours, plain in ((before, plain_before), (after, plain_after)):
        extra = {name for name in set(ours) - set(plain) if name.startswith("torch.")}
        assert len(extra) <= 10, extra


def test_the_mark_is_the_one_that_torch_sets():
    """The compiler's own function would import the compiler."""

    def function(): ...

    marked = torch.compiler.assume_constant_result(function)
    assert marked is function
    assert vars(function) == vars(context._in_torch_func) != {}


def test_a_first_call_may_be_compiled():
    """Nothing waits for a call without the compiler."""
    code = """
import io, json, torch, streamnorm
made = streamnorm.StreamingNorm(3)
x = torch.randn(4, 3, requires_grad=True)
torch.compile(made, backend="aot_eager", fullgraph=True)(x).sum().backward()
print(json.dumps([int(made.stats.count), int(made.grads.count)]))
"""
    assert said(code) == [1, 1]


def test_an_import_of_the_package_is_no_import_of_torch():
    loaded = said(
        "import json, sys, streamnorm; streamnorm.__version__, dir(streamnorm); print(json.dumps([*sys.modules]))"
    )
    assert "torch" not in loaded


HOOKS = """
import json, sys, torch, streamnorm
from torch.optim import optimizer
streamnorm.StreamingNorm, streamnorm.SampleNorm(2), streamnorm.GeneralBatchNorm(2), streamnorm.kernels
counts = [len(optimizer._global_optimizer_post_hooks)]
if sys.argv[1] == "made":
    layer = streamnorm.StreamingNorm(2)
else:
    layer = torch.load(sys.argv[1], weights_only=False)
counts.append(len(optimizer._global_optimizer_post_hooks))
more = [streamnorm.StreamingNorm(2), streamnorm.GRU(2, 2)]
counts.append(len(optimizer._global_optimizer_post_hooks))
layer(torch.randn(4, 2)).sum().backward()
torch.optim.SGD(layer.parameters(), 0.1).step()
counts.append(int(layer._pulse.updates > 0))
print(json.dumps(counts))
"""


@pytest.mark.parametrize("how", ["made", "unpickled"])
def test_optimizers_are_listened_to_from_the_first_layer_on(how, tmp_path):
    path = tmp_path / "layer.pt"
    torch.save(streamnorm.StreamingNorm(2), path)
    assert said(HOOKS, "made" if how == "made" else str(path)) == [0, 1, 1, 1]


def test_first_layers_made_at_once_listen_once(monkeypatch):
    """By several threads; copies and pickles are layers too."""
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(torch_optimizer, hooks, type(getattr(torch_optimizer, hooks))())
    layer = pickle.dumps(streamnorm.StreamingNorm(2))
    monkeypatch.setattr(updates, "_listening", ())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=pickle.loads, args=(layer,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(torch_optimizer._global_optimizer_post_hooks) == 1


# The names of the package

NAMES = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import streamnorm
functions = set(streamnorm.__all__) - {"__version__", "backends", "functional"}
wrong = [name for name in functions if not callable(getattr(streamnorm, name))]
space = {}
exec("from streamnorm import *", space)
wrong += [name for name in streamnorm.__all__ if space[name] is not getattr(streamnorm, name)]
print(json.dumps(wrong))
"""


@pytest.mark.parametrize("first", [[], ["convert"], ["convert.folding", "convert"], MODULES, MODULES[::-1]])
def test_public_names_win_over_files_of_the_same_name(first):
    """Whatever file of the package was imported first."""
    assert said(NAMES, *(f"streamnorm.{name}" for name in first)) == []


def test_files_are_attributes_by_their_old_names():
    """And importable: as the very modules that they are now. The kernels' public functions go on working."""
    code = """
import importlib, json, sys, streamnorm
same = []
for old, new in streamnorm._MOVED.items():
    now = importlib.import_module(f"streamnorm.{new}")
    same.append(getattr(streamnorm, old) is now is importlib.import_module(f"streamnorm.{old}"))
    same.append(now.__name__ == now.__spec__.name)
with streamnorm.kernels.disabled():
    switched_off = streamnorm.kernels.available()
found = [type(streamnorm.lab).__name__, all(same), now.__name__, switched_off]
print(json.dumps([*found, hasattr(streamnorm, "no_such"), hasattr(streamnorm, "__no__")]))
"""
    assert said(code) == ["module", True, "streamnorm.nn.streaming", False, False, False]


def test_the_names_of_the_package():
    assert set(streamnorm.__all__) <= set(dir(streamnorm))
    with pytest.raises(AttributeError, match=r"module 'streamnorm' has no attribute 'StreamNorm'"):
        _ = streamnorm.StreamNorm
    with pytest.raises(ImportError, match="cannot import name 'StreamNorm'"):
        from streamnorm import StreamNorm  # noqa: F401
    assert streamnorm.StreamingNorm is streamnorm.streaming.StreamingNorm
    assert pickle.loads(pickle.dumps(streamnorm.convert)) is streamnorm.convert


# The command, before torch is there

ANSWERED = [
    (["--help"], 0, "bench-online"),
    (["--version"], 0, streamnorm.__version__),
    (["list"], 0, FIGURES["online"].paper),
    (["run", "--help"], 0, "presets"),
    (["bench-online", "--help"], 0, "--no-train"),
    ([], 2, "COMMAND"),
    (["walk"], 2, "walk"),
    (["run", "olnine"], 2, "no figure called 'olnine'"),
    (["run", "online", "--seeds", "0"], 2, "1 or more"),
    (["run", "online", "--preset", "huge"], 2, "huge"),
    (["run", "online", "--data-dir", "nowhere"], 2, "nowhere does not exist"),
    (["run", "online", "--data", "shakespeare"], 2, "online learns from images"),
    (["run", "rnn", "--data", "missing.txt"], 2, "missing.txt"),
    (["bench-online", "--rates", "9"], 2, "5 of its own"),
    (["bench-online", "--data-dir", "nowhere"], 2, "nowhere does not exist"),
    (["bench-online", "--page", "missing.md"], 2, "missing.md cannot be read"),
    (["report", "--out", "empty"], 2, "no results in empty"),
]
WATCHED = """
import json, runpy, sys
code = 0
try:
    runpy.run_module("streamnorm", run_name="__main__", alter_sys=True)
except SystemExit as stopped:
    code = stopped.code
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "matplotlib")]
if sys.argv[-1] in ("--help", "--version"):  # what only a command needs is half of its start
    heavy += {"streamnorm.lab.commands", "streamnorm.lab.view", "importlib.resources"} & set(sys.modules)
print(json.dumps([code or 0, heavy]))
"""


@pytest.mark.parametrize(("arguments", "code", "words"), ANSWERED, ids=[" ".join(case[0]) for case in ANSWERED])
def test_the_command_answers_without_torch(arguments, code, words, tmp_path):
    command = [sys.executable, "-c", WATCHED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert json.loads(last) == [code, []]
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# Ctrl-C and closed pipes

# As the installed command starts, and a word when it has: before that it is Python that starts.
# Says so as soon as it listens to Ctrl-C: before that, it is Python's own start.
ENTERED = """
import signal, sys
from streamnorm.__main__ import main

heed = signal.signal


def noted(*arguments):
    heed(*arguments)
    signal.signal = heed
    print("entered", flush=True)


signal.signal = noted
sys.exit(main())
"""


def start(*command, **options):
    """A process that Ctrl-C reaches: started in the background, it would be ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is ignored here is ignored there
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    try:
        return subprocess.Popen([sys.executable, *command], **pipes | options)
    finally:
        signal.signal(signal.SIGINT, old)


def stopped(process):
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "streamnorm: stopped" in errors


RUN = ["run", "online", "--preset", "smoke", "--data", "digits", "--seeds", "50"]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5])
def test_ctrl_c_while_it_starts_is_no_traceback(delay, tmp_path):
    process = start("-c", ENTERED, *RUN, cwd=tmp_path)
    assert process.stdout.readline() == "entered\n"
    threading.Event().wait(delay)
    stopped(process)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at what a process has loaded")
@pytest.mark.parametrize("library", ["libtorch_cpu", "_multiarray_umath", "libtorch_python"])
def test_ctrl_c_while_libraries_are_loaded_is_no_traceback(library, tmp_path):
    process = start("-m", "streamnorm", *RUN, cwd=tmp_path)
    wait_for(lambda: library in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"), process)
    stopped(process)


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["run", "--help"]], ids=" ".join)
@pytest.mark.parametrize("early", [True, False])
def test_a_reader_that_goes_away_is_no_traceback(arguments, early):
    """As `streamnorm list | head` does, before anything was written, or after a line."""
    with start("-u" if not early else "-B", "-m", "streamnorm", *arguments) as process:
        if not early:
            process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode in (0, 141)
    assert errors == ""


def test_a_pipe_that_is_closed_at_the_end_of_a_run_leaves_its_results(tmp_path):
    command = ["run", "dau", "--preset", "smoke", "--data", "digits", "--out", str(tmp_path)]
    with start("-m", "streamnorm", *command) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141, errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert (tmp_path / "dau-smoke-digits.json").exists()
