"""Data parallel, in two real processes started by torchrun: windows merge to what one process would hold."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from distributed_cases import SETTINGS, inputs, snapshot
from torch import nn

import streamnorm
from streamnorm import StreamingNorm

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two processes found, by the name of the case."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [*TORCHRUN, HERE / "distributed_cases.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return lambda case: [torch.load(folder / f"{case}-{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_merged_windows_are_those_of_one_process(ranks, name):
    """One that saw the mini-batches of both in one window: the mean; sigma unless c differs; H2 for the same s_hat."""
    merged, other = (found[name] for found in ranks("laws"))
    norm = StreamingNorm(3, dtype=torch.float64, **SETTINGS[name])
    for window in range(3):
        assert_same(merged[window], other[window])
        for rank in range(2):
            for x, dy in inputs(window, rank):
                norm(x.requires_grad_()).backward(dy)
        norm.weights_updated()
        one, two = snapshot(norm), merged[window]
        assert two["stats_count"] == one["stats_count"]
        assert two["grads_count"] == one["grads_count"]
        for count in ("seen", "elements", "counted", "samples"):
            assert two[count] == one[count], count
        rows = slice(0, 1) if norm.center == "running" else slice(0, 2)
        for part in ("stats_short", "stats_long", "eval_long"):
            assert_close(two[part][rows], one[part][rows])
        if norm.warmup == 0:
            assert_close(two["mean"], one["mean"])
            assert_close(two["sigma"], one["sigma"])
            assert_close(two["eval_mean"], one["eval_mean"])
            assert_close(two["eval_sigma"], one["eval_sigma"])
        if name == "frozen" and window:
            assert_close(two["grads_short"], one["grads_short"])


def test_ddp_ranks_agree_bit_for_bit(ranks):
    """With no_sync() accumulation, uneven batches, buffers that DDP broadcasts, and windows that are their own."""
    found = ranks("ddp")
    for one, two in zip(*(each["states"] for each in found), strict=True):
        assert_same(one, two)
    assert all(each["own windows"] == 3 for each in found)  # until they are merged
    assert found[0]["states"][-1]["norm.stats_count"] == 6
    assert torch.equal(found[0]["output"], found[1]["output"])
    assert not torch.equal(found[0]["states"][0]["norm.stats_short"], found[0]["states"][1]["norm.stats_short"])


def test_a_sharded_optimizer(ranks):
    one, two = ranks("sharded")
    assert_same(one, two)
    assert one["norm.stats_count"] == 2
    assert not one["norm.stats_empty"]


def test_a_rank_without_a_batch(ranks):
    states = ranks("no_batch")
    for one, two in zip(*states, strict=True):
        assert_same(one, two)
    counts = [int(state["norm.stats_count"]) for state in states[0]]
    assert counts == [1, 2, 1, 0, 2]
    assert_same_statistics(states[0][2], states[0][3])  # a step without any batch: only folded


def assert_same_statistics(a, b):
    assert torch.equal(a["norm.mean"], b["norm.mean"])
    assert torch.equal(a["norm.stats_short"], b["norm.stats_short"])
    assert not torch.equal(a["norm.stats_long"], b["norm.stats_long"])


def test_one_message_per_update_for_the_whole_model(ranks):
    for found in ranks("one_message"):
        forward, first, again, later = found["sent"]
        assert forward == again == []
        assert len(first) == 3  # once to see that all have the same layers, once for the sizes of statistics
        assert later == [found["numbers"]]


@pytest.mark.parametrize("case", ["join", "join_alone"])
def test_uneven_inputs_through_join(ranks, case):
    one, two = ranks(case)
    assert_same(one, two)
    assert one["norm.stats_count" if case == "join" else "stats_count"] > 0


def test_join_counts_every_window(ranks):
    """The windows that only one process had are streamed into the state of both."""
    norm = StreamingNorm(3, dtype=torch.float64)
    for window in range(5):
        for rank in [1] if window in (1, 3) else range(2):
            for x, dy in inputs(window, rank):
                norm(x.requires_grad_()).backward(dy)
        norm.weights_updated()
    found = ranks("join_alone")[0]
    assert_close(found["stats_long"][0], norm.stats.long[0])
    assert found["seen"] == norm.state.seen


def test_fsdp(ranks):
    one, two = ranks("fsdp")
    if one is None:
        pytest.skip("this torch has no fully_shard")
    assert_same(one["state"], two["state"])
    assert one["counts"] == [1, 1, 1]  # every step was heard of and folded


def test_resumed_in_the_middle_of_a_window(ranks):
    for found in ranks("resumed"):
        assert_same(found["whole"], found["resumed"])


def test_all_begin_with_what_the_first_process_loaded(ranks):
    one, two = ranks("loaded_by_one")
    assert_same(one, two)
    assert torch.equal(one["stats_long"][0], torch.zeros(3))
    assert not one["stats_empty"]


def test_all_go_on_with_what_the_first_process_loads_later(ranks):
    one, two = ranks("loaded_late")
    assert_same(one, two)


def test_statistics_with_a_location(ranks):
    one, two = ranks("sizes")
    for mine, theirs in zip(one["states"], two["states"], strict=True):
        mine.pop("weight"), mine.pop("bias")
        assert_same(mine, {key: theirs[key] for key in mine})
    assert [int(state["stats_count"]) for state in one["states"]] == [2, 1, 2]
    assert "(3, 2) in this process" in one["refused"]
    assert "(3, 3) in this process" in two["refused"]


def test_a_skipped_step_merges_nothing(ranks):
    one, two = ranks("skipped")
    assert_same(one[0], two[0])
    assert_same(one[2], two[2])
    assert not torch.equal(one[1]["stats_short"], two[1]["stats_short"])
    assert [int(state["stats_count"]) for state in one] == [2, 1, 4]


def test_groups(ranks):
    for found in ranks("groups"):
        assert found["same"]
        assert found["pickled"] is None
        assert found["state"]["stats_count"] == 2
        assert found["local"]["stats_count"] == 1


DIFFERENCES = {
    "order of the moment": r"layer 1 of 1, .*: p=2.0 \(rank 0\), p=1.0 \(rank 1\)",
    "weights": r"layer 2 of 2, .*StreamingNorm\(3\): alpha=\(0.5, 0.5\) \(rank 0\), alpha=\(0.7, 0.3\) \(rank 1\)",
    "guard": r"guard=True \(rank 0\), guard=False \(rank 1\)",
    "reference": r"ref='BA1' \(rank 0\), ref='SP2' \(rank 1\)",
    "channels": r"layer 2 of 2, .*: StreamingNorm\(4\) \(rank 0\), StreamingNorm\(3\) \(rank 1\)",
    "one statistic for all": r"StreamingNorm\(3\) \(rank 0\), StreamingNorm\(4\) \(rank 1\)",
    "type": r"dtype=torch.float32 \(rank 0\), dtype=torch.float64 \(rank 1\)",
    "number of layers": r"2 layers \(rank 0\), 1 layer \(rank 1\)",
    "order of layers": r"layer 1 of 2, .*: StreamingNorm\(3\) \(rank 0\), StreamingNorm\(4\) \(rank 1\)",
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_layers_that_differ_are_named_on_every_rank(ranks, name):
    for found in ranks("different"):
        for said in found[name]:  # at every attempt
            assert re.search(DIFFERENCES[name], said), said
            assert "same settings" in said
            assert "STATE CHANGED" not in said


def test_what_is_the_same_is_not_refused(ranks):
    for found in ranks("different"):
        assert found["spelling"] == ["", ""]


def test_layers_and_groups_that_come_later_are_compared_too(ranks):
    for found in ranks("different"):
        first, later = found["later"]
        assert first == ""
        assert "layer 2 of 2" in later
        assert "eps=1e-05 (rank 0), eps=2e-05 (rank 1)" in later
        once, in_new_group = found["another group"]
        assert once == ""  # a layer is compared once
        assert "alpha" in in_new_group
    for first, known, new in ranks("again"):
        assert (first, known) == ("", "")
        assert "p=1.0 (rank 0), p=2.0 (rank 1)" in new


def test_without_torch_distributed_a_layer_keeps_to_itself():
    norm, alone = StreamingNorm(3, process_group="world"), StreamingNorm(3)
    x = torch.randn(4, 3)
    for each in (norm, alone):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    state = snapshot(norm)
    assert state.pop("seen_before") == 0
    assert_same(state, snapshot(alone))
    alone.load_state_dict(norm.state_dict())  # the other way is tested by test_resumed
    norm.load_state_dict(alone.state_dict())
    assert "process_group='world'" in repr(norm)
    wrong = dict(norm.state_dict(), seen_before=torch.tensor(-400.0), mean=torch.zeros(7))
    with pytest.raises(RuntimeError, match="size mismatch"):
        norm.load_state_dict(wrong)
    assert norm.seen_before == 4  # of the state that was loaded before
    with pytest.raises(ValueError, match=r"StreamJoin: .*process_group=.world."):
        streamnorm.StreamJoin(torch.optim.SGD(nn.Sequential(norm).parameters(), lr=0.1))


def example(checkpoint, lose=False):
    """Run the example under torchrun; with `lose`, kill a worker after it has saved. Returns what was printed."""
    options = ["--max-restarts", "2", HERE.parent / "examples/distributed.py", "--updates", "20"]
    command = [*TORCHRUN, *options, "--checkpoint", checkpoint]
    printed = []
    pipes = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with (
        checkpoint.with_suffix(".log").open("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stderr=log, **pipes) as running,
    ):
        end = threading.Timer(180, os.killpg, (running.pid, signal.SIGKILL))
        end.start()
        for line in running.stdout:
            printed.append(line)
            if lose and line.startswith("update 10"):
                worker = re.search(r"rank 1 is process (\d+)", "".join(printed))
                os.kill(int(worker[1]), signal.SIGKILL)
                lose = False
        end.cancel()
        log.seek(0)
        assert running.wait() == 0, log.read()
    return "".join(printed)


def test_the_loss_of_a_worker_changes_nothing(tmp_path):
    example(tmp_path / "whole.pt")
    printed = example(tmp_path / "lost.pt", lose=True)
    starts = re.findall(r"begins at update (\d+)", printed)
    assert starts[:2] == ["0", "0"]
    assert starts[2] == starts[3] != "0"
    whole, lost = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "lost"))
    assert_same(whole["model"], lost["model"])
    assert whole["update"] == lost["update"] == 20
