"""The training loop: what it trains, that it stops and goes on exactly, and what it leaves on disk."""

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import wait_for

from streamnorm.lab.data import load_images, load_text
from streamnorm.lab.errors import DataError, StoreError
from streamnorm.lab.figures import BATCH_NORM, FIGURES, LAYER_NORM, STREAMING_RECURRENT, TIME_SPECIFIC
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run
from streamnorm.lab.scales import PAPER, QUICK, SMOKE, scaled
from streamnorm.lab.tasks import ImageTask, TextTask
from streamnorm.lab.train import Training, load_checkpoint, train

ROOT = Path(__file__).parents[2]
NORMS = {"sample": LAYER_NORM, "batch": BATCH_NORM, "timed": TIME_SPECIFIC, "streaming": STREAMING_RECURRENT}
IMAGE_RUN = Run(
    "A", STREAMING_RECURRENT, samples=4, batches=2, width=8, rates=((0.1, 1), (0.01, 1)), data="digits",
    train_size=64, test_size=32, evaluate=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return load_images("digits")


@pytest.fixture(scope="module")
def text(text_file):
    return load_text(str(text_file))


def text_run(norm=STREAMING_RECURRENT, net="gru"):
    run = Run(net, norm, samples=4, batches=2, width=8, chunk=10, optimizer="manhattan", momentum=0.0, evaluate=4)
    return replace(run, rates=((0.01, 0.5), (0.001, 0.25)), data="text.txt", train_size=3_000)


# Networks


def weights(model):
    """Without the gains and biases of the norms."""
    return sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_parameter_counts_are_those_of_the_design(norm):
    assert weights(build(Run("A", norm, width=512))) == 3072 * 512 + 2 * 512**2 + 512 * 10 + 10
    for unroll in ((1, 1), (5, 1), (5, 5)):
        assert weights(build(Run("C", norm, unroll=unroll))) == 187_082
    assert weights(build(Run("C", norm, unroll=(5, 5), tied=False))) == 777_930
    stem, conv, up = 3 * 64 * 9 + 64, 64 * 64 * 9 + 64, 64 * 64 * 16 + 64
    assert weights(build(Run("D", norm, unroll=(5, 0)))) == stem + 3 * conv + up + 64 * 10 + 10
    assert weights(build(Run("gru", norm, width=100), 84)) == 3 * 100 * (84 + 100) + 100 * 84 + 84


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("net", ["A", "C", "D"])
def test_networks_take_any_norm(net, norm):
    model = build(Run(net, norm, width=4, unroll=(2, 2)))
    for _ in range(2):
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_net_c_is_the_formula_of_the_design():
    torch.manual_seed(0)
    model = build(Run("C", LAYER_NORM, width=4, unroll=(3, 2)))
    x = torch.randn(2, 3, 32, 32)

    def block(stage, h):
        (only,) = model.stages[stage]
        one, two = only.one, only.two
        return h + two.convolution(F.relu(two.norm(one.convolution(F.relu(one.norm(h))))))

    h = model.stem(x)
    for _ in range(3):
        h = block(0, h)
    h = model.transition.convolution(F.relu(model.transition.norm(h)))
    assert h.shape == (2, 4, 16, 16)
    for _ in range(2):
        h = block(1, h)
    expected = model.readout.head(F.relu(model.readout.norm(h)).mean((2, 3)))
    torch.testing.assert_close(model(x), expected)


def test_net_d_updates_both_states_at_once():
    torch.manual_seed(0)
    model = build(Run("D", LAYER_NORM, width=4, unroll=(3, 0)))
    x = torch.randn(2, 3, 32, 32)
    old_1, old_2 = model.stem(x), torch.zeros(2, 4, 16, 16)
    for _ in range(3):
        new_1 = old_1 + model.t11(old_1) + model.t21(old_2)
        new_2 = old_2 + model.t22(old_2) + model.t12(old_1)
        old_1, old_2 = new_1, new_2
    torch.testing.assert_close(model(x), model.readout(old_2))


def test_a_timed_norm_learns_each_step_of_an_unrolled_net():
    model = build(Run("C", TIME_SPECIFIC, width=4, unroll=(3, 1)))
    model(torch.randn(8, 3, 32, 32))
    (block,) = model.stages[0]
    means = block.one.norm.mean
    assert means.shape == (3, 4)
    assert len({tuple(row.tolist()) for row in means}) == 3


# Batches


def test_an_epoch_shows_every_image_once_in_full_windows(digits):
    task = ImageTask(replace(IMAGE_RUN, train_size=70), digits)
    assert task.updates == 70 // 8
    seen = [y for update in range(task.updates) for _, y in task.batches(0, update)]
    assert all(len(y) == 4 for y in seen)
    orders = [ImageTask(replace(IMAGE_RUN, seed=seed), digits) for seed in (0, 0, 1)]
    labels = [[y.tolist() for _, y in task.batches(epoch, 0)] for task in orders for epoch in (0, 1)]
    assert labels[0] == labels[2]
    assert len({str(each) for each in labels}) == 4  # a new order for each epoch and each seed
    assert len(set(task.order.tolist())) == 70


def test_runs_with_equal_windows_update_on_the_same_samples(digits):
    tasks = [ImageTask(replace(IMAGE_RUN, samples=s, batches=b), digits) for s, b in ((1, 8), (2, 4), (8, 1))]
    for update in (0, 3):
        xs = [torch.cat([x for x, _ in task.batches(1, update)]) for task in tasks]
        assert torch.equal(xs[0], xs[1])
        assert torch.equal(xs[0], xs[2])


def test_images_are_standardised_per_channel(digits):
    task = ImageTask(replace(IMAGE_RUN, train_size=None), digits)
    x = task.standardised(digits.train)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_a_text_is_read_in_order_by_parallel_streams(text):
    run = text_run()
    task = TextTask(run, text)
    chunks = [chunk for update in range(task.updates) for chunk in task.batches(0, update)]
    length = 3_000 // 4
    for stream in range(4):
        read = torch.cat([x[:, stream] for x, _ in chunks])
        assert torch.equal(read, text.train[stream * length : stream * length + len(read)].long())
        following = torch.cat([y[:, stream] for _, y in chunks])
        assert torch.equal(following[:-1], read[1:])
    assert len(chunks) == task.updates * 2
    assert len(read) > length - 2 * 2 * run.chunk


def test_the_state_of_a_text_goes_on_from_chunk_to_chunk_and_not_over_epochs(text):
    task = TextTask(text_run(LAYER_NORM), text)
    torch.manual_seed(0)
    model = build(task.run, len(text.symbols))
    states = []
    for epoch, update in ((0, 0), (0, 1), (1, 0)):
        for x, y in task.batches(epoch, update):
            states.append(task.state)
            task.loss(model, x, y)
    assert states[0] is None
    assert states[4] is None
    assert all(state is not None and not state.requires_grad for state in states[1:4])


def test_too_little_data_is_refused(digits, text):
    with pytest.raises(DataError, match="64 training images make no update of 128"):
        ImageTask(replace(IMAGE_RUN, samples=128, batches=1), digits)
    with pytest.raises(DataError, match="use a longer text"):
        TextTask(replace(text_run(), train_size=50), text)


# Runs


def test_the_learning_rate_falls_as_in_the_paper():
    run = FIGURES["lp"]["p = 2"]
    assert (run.epochs, run.rate(0), run.rate(24.99), run.rate(25), run.rate(30)) == (30, 0.1, 0.1, 0.01, 0.01)
    quick = scaled(run, QUICK)
    assert (quick.epochs, quick.rate(2.49), quick.rate(2.5)) == (3, 0.1, 0.01)


def test_an_address_is_made_of_all_settings():
    run = IMAGE_RUN
    changed = [
        run.address("other data"),
        *(replace(run, **{name: value}).address("data") for name, value in
          {"seed": 1, "width": 9, "rates": ((0.1, 2),), "norm": Norm("batch"), "evaluate": 3, "tied": False,
           "test_first": True, "start": 2.0}.items()),
    ]  # fmt: skip
    assert run.address("data") == replace(run).address("data")
    assert len({run.address("data"), *changed}) == 1 + len(changed)


def test_the_address_of_a_run_on_the_cpu_does_not_tell_of_it():
    """Results from before there were other devices are found by it; which device of a type is told by none."""
    run = Run("A", Norm("batch"))
    assert run.address("data") == "9a64f2512d40e680"
    assert "device" not in run.settings()
    first, second = (replace(run, device=name) for name in ("cuda", "cuda:1"))
    assert first.address("data") == second.address("data") != run.address("data")
    assert first.settings()["device"] == second.settings()["device"] == "cuda"


def test_presets_keep_what_is_promised():
    for figure in FIGURES.values():
        for curve in figure.curves:
            assert replace(scaled(curve.run, PAPER), evaluate=curve.run.evaluate) == curve.run
            quick, smoke = scaled(curve.run, QUICK), scaled(curve.run, SMOKE)
            assert quick.epochs == 3
            assert smoke.epochs == 1
            if not curve.run.is_text:
                assert quick.train_size >= 10_000
                assert quick.width >= 16
                assert quick.samples * quick.batches == curve.run.samples * curve.run.batches
    assert QUICK.seeds == PAPER.seeds == 3


def test_a_run_is_trained_once(digits, tmp_path):
    heard = []
    one = train(IMAGE_RUN, digits, tmp_path, lambda *news: heard.append(news))
    assert heard[-1][:2] == (16, 16)
    assert one["curves"]["update"] == list(range(1, 17))
    assert one["curves"]["rate"] == [0.1] * 8 + [0.01] * 8
    assert {"train_loss", "train_error", "test_loss", "test_error", "gradient", "sigma_min", "drift"} <= set(
        one["curves"]
    )
    assert one["parameters"] == weights(build(IMAGE_RUN)) + 3 * 16
    heard.clear()
    assert train(IMAGE_RUN, digits, tmp_path, lambda *news: heard.append(news)) == one
    assert not heard
    train(replace(IMAGE_RUN, seed=1), digits, tmp_path)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    files = {path.name for path in folders[0].iterdir()}
    assert files == {"lock", "metrics.jsonl", "result.json", "tensorboard"}
    (folder,) = (path for path in folders if path.name == one["id"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["test_loss"] for row in rows] == one["curves"]["test_loss"]
    assert list((folder / "tensorboard").iterdir())


TESTED = replace(IMAGE_RUN, train_size=64, rates=((0.1, 1),))


def trained(run, data, folder):
    """How a training goes: its rows, and the weights and state that it ends with."""
    training = Training(run, data, folder / run.address(data.fingerprint))
    training.resume()
    training.go_on(lambda *news: None, every=1e9)
    training.log.close()
    return training.rows, training.model.state_dict()


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_test_before_the_update_leaves_the_training_as_it_is(norm, digits, tmp_path):
    runs = (replace(TESTED, norm=norm, test_first=first) for first in (False, True))
    (after, end), (before, same) = (trained(run, digits, tmp_path) for run in runs)
    assert [row["train_loss"] for row in after] == [row["train_loss"] for row in before]
    assert [row["test_loss"] for row in after] != [row["test_loss"] for row in before]
    for name, value in end.items():
        torch.testing.assert_close(same[name], value, rtol=0, atol=0)


def test_a_test_before_the_update_is_of_the_weights_before_it(digits, tmp_path):
    """Where nothing but the weights changes, it is the test after the update before."""
    run = replace(TESTED, norm=Norm("none"), rates=((0.01, 1),))
    before, after = (
        [row["test_loss"] for row in trained(replace(run, test_first=first), digits, tmp_path)[0]]
        for first in (True, False)
    )
    assert before[1:] == after[:-1]
    assert before[0] != after[0]


def test_a_test_before_the_update_has_the_statistics_of_the_whole_window(digits, tmp_path):
    """The last update is not performed and its window's statistics are not cleared: all by hand, for one update."""
    run = replace(TESTED, test_first=True, rates=((0.1, 1 / 8),))
    (row,), _ = trained(run, digits, tmp_path)
    task = ImageTask(run, digits)
    torch.manual_seed(run.seed)
    model = build(run)
    for x, y in task.batches(0, 0):
        task.loss(model, x, y)[0].backward()
    with torch.no_grad():
        assert row["test_loss"] == pytest.approx(task.evaluate(model.eval())["test_loss"], rel=1e-5)


@pytest.mark.parametrize("net", ["rnn", "A", "C"])
def test_first_weights_are_larger_by_a_factor_where_norms_follow(net):
    plain, large = Run(net, LAYER_NORM, width=8), Run(net, LAYER_NORM, width=8, start=4.0)
    found = []
    for run in (plain, large):
        torch.manual_seed(0)
        found.append(dict(build(run, symbols=5).named_parameters()))
    for name, weight in found[0].items():
        scaled_up = weight.dim() > 1 and "head" not in name
        assert torch.equal(found[1][name], weight * 4 if scaled_up else weight), name
    assert sum(weight.dim() > 1 for weight in found[0].values()) >= 3


def test_it_learns(digits, tmp_path):
    run = replace(IMAGE_RUN, samples=32, batches=1, width=64, train_size=None, test_size=None, rates=((0.1, 3),))
    assert train(run, digits, tmp_path)["curves"]["test_error"][-1] < 0.15


def test_a_norm_that_cannot_run_is_a_result(digits, tmp_path):
    result = train(replace(IMAGE_RUN, norm=BATCH_NORM, samples=1, batches=8), digits, tmp_path)
    assert result["outcome"] == "refused"
    assert "one element" in result["message"] or "1 " in result["message"]
    assert result["curves"] == {}


def test_a_divergence_ends_the_run(digits, tmp_path):
    run = replace(IMAGE_RUN, norm=LAYER_NORM, rates=((1e38, 2),))
    result = train(run, digits, tmp_path)
    assert result["outcome"] == "diverged"
    assert result["updates"] < 16
    assert result["curves"]["test_loss"][-1] is None or result["curves"]["train_loss"][-1] is None
    json.dumps(result, allow_nan=False)


# Interruptions


LONG_IMAGES = replace(IMAGE_RUN, train_size=640, evaluate=20)
LONG_TEXT = replace(text_run(), rates=((0.01, 2), (0.001, 1)))
SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/lab"]
from test_train import LONG_IMAGES, LONG_TEXT, load_images, load_text, train
torch.set_num_threads(1)
source, out, every = sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
run, data = (LONG_IMAGES, load_images(source)) if source == "digits" else (LONG_TEXT, load_text(source))
train(run, data, out, every=every)
"""


def start(source, out, every=0.0):
    """A process that trains; `every`: seconds between checkpoints, 0 for one after each update."""
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "tests"), str(source), str(out), str(every)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def end(process):
    """How it ended: exit code and error output."""
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def ending(run, data, out):
    """How the run ends, trained or gone on with in this process; with one thread, as in the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(run, data, out)
    torch.set_num_threads(threads)
    (path,) = out.glob("*/result.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    return result["curves"], result["updates"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, digits, text):
    """How the runs end that nobody interrupts."""
    runs = (LONG_IMAGES, digits), (LONG_TEXT, text)
    return {run: ending(run, data, tmp_path_factory.mktemp("whole")) for run, data in runs}


@pytest.mark.parametrize("kind", ["images", "text"])
def test_killed_at_any_moment_it_goes_on_exactly(kind, digits, text, text_file, uninterrupted, tmp_path):
    """A process that is killed twice, a little later each time, ends with the numbers of one that is not."""
    source, run, data = ("digits", LONG_IMAGES, digits) if kind == "images" else (text_file, LONG_TEXT, text)
    for delay in (0.01, 0.1):
        process = start(source, tmp_path)
        last = [path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoint.pt")]
        wait_for(
            lambda last=last: [p.stat().st_mtime_ns for p in tmp_path.glob("*/checkpoint.pt")] not in (last, []),
            process,
        )
        time.sleep(delay)
        process.kill()
        assert end(process)[0] == -signal.SIGKILL, "it ended before it could be killed"
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    assert load_checkpoint(checkpoint)["done"] > 1
    assert ending(run, data, tmp_path) == uninterrupted[run]
    assert not checkpoint.exists()
    assert not list(tmp_path.glob("*/.*.part"))


def test_ctrl_c_saves_at_a_whole_update(digits, uninterrupted, tmp_path):
    process = start("digits", tmp_path, every=1e9)  # no other checkpoint than that of the interrupt
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")), process)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in end(process)[1]
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    assert 0 < load_checkpoint(checkpoint)["done"] < 160
    assert ending(LONG_IMAGES, digits, tmp_path) == uninterrupted[LONG_IMAGES]


def test_a_disk_without_room_leaves_the_last_checkpoint(digits, uninterrupted, tmp_path):
    """The system refuses larger files, as a full disk does; the checkpoint before is whole, and the run goes on."""
    process = start("digits", tmp_path)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    code, errors = end(process)
    assert code == 1
    assert "StoreError: cannot write" in errors
    assert "File too large; free some space" in errors
    (folder,) = tmp_path.iterdir()
    assert not list(folder.glob(".*.part"))
    assert load_checkpoint(folder / "checkpoint.pt")["done"] > 0
    assert ending(LONG_IMAGES, digits, tmp_path) == uninterrupted[LONG_IMAGES]


def test_a_damaged_checkpoint_is_named(digits, tmp_path):
    training = Training(IMAGE_RUN, digits, tmp_path / IMAGE_RUN.address(digits.fingerprint))
    training.update()
    training.save()
    path = training.folder / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:10], b""):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"checkpoint\.pt is damaged .* remove it"):
            train(IMAGE_RUN, digits, tmp_path)


def test_a_divergence_is_not_forgotten_when_it_is_resumed(digits, tmp_path):
    """Stopped between the row that has no number and the result, the run ends as without the stop."""
    run = replace(IMAGE_RUN, norm=LAYER_NORM, rates=((1e38, 2),))
    whole = train(run, digits, tmp_path / "whole")
    training = Training(run, digits, tmp_path / "parts" / run.address(digits.fingerprint))
    training.resume()
    while training.outcome == "finished":
        training.update()
        if training.due():
            training.note()
    training.save()
    training.log.close()
    resumed = train(run, digits, tmp_path / "parts")
    assert (resumed["outcome"], resumed["updates"]) == ("diverged", whole["updates"])
    assert resumed["curves"] == whole["curves"]


def test_an_error_that_is_no_refusal_is_no_result(digits, tmp_path):
    run = replace(IMAGE_RUN, norm=replace(STREAMING_RECURRENT, ref="BA9"))
    with pytest.raises(ValueError, match="BA9"):
        train(run, digits, tmp_path)
    assert not list(tmp_path.glob("*/result.json"))


def test_a_short_text_is_validated_in_fewer_streams(text_file):
    text = load_text(str(text_file))
    task = TextTask(replace(text_run(), test_size=9), text)
    assert task.valid.shape == (9, 1)


def test_two_processes_do_not_train_one_run(digits, tmp_path):
    first = start("digits", tmp_path)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), first)
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreError, match="is being trained by another process"):
        train(LONG_IMAGES, digits, tmp_path)
    first.send_signal(signal.SIGCONT)
    assert end(first) == (0, "")
