"""The agent of docs/measured/reinforcement.md: its equations, which passes push, and the page that quotes it."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("gymnasium", reason="environments come from gymnasium, of the extra streamnorm[rl]")

import numpy as np

from streamnorm import SampleNorm, StreamingNorm

ROOT = Path(__file__).parent.parent
SCRIPT, PAGE = ROOT / "examples/stream_q.py", ROOT / "docs/measured/reinforcement.md"
RESULTS = ROOT / "docs/results/reinforcement"


def load():
    specification = importlib.util.spec_from_file_location("stream_q", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


example = load()


def live(agent, steps, generator):
    """Steps in a world that is noise; no episode ends."""
    for _ in range(steps):
        agent.act(agent.see(generator.standard_normal(4)), 0.5)
        agent.learn(1.0, agent.see(generator.standard_normal(4)), False, False)


# The agent


@pytest.mark.parametrize(("error", "lr"), [(0.3, 1e-3), (-5.0, 1e-3), (2.0, 1e9)])
def test_an_update_is_that_of_the_equations(error, lr):
    torch.manual_seed(0)
    weights = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = example.ObGD(weights, lr=lr, kappa=2.0, decay=0.5)
    z, w = np.zeros(6), torch.cat(weights).detach().numpy().copy()
    for times in (1.0, 1.0, 4.0):
        gradient = torch.randn(6, dtype=torch.float64)
        for weight, part in zip(weights, gradient.split(3), strict=True):
            weight.grad = part * times
        optimizer.step(error, times)
        z = 0.5 * z + gradient.numpy()
        w += min(lr, 1 / (2.0 * max(abs(error), 1.0) * np.abs(z).sum())) * error * z
        np.testing.assert_allclose(torch.cat(weights).detach().numpy(), w, rtol=1e-12)
    optimizer.forget()
    assert not any(trace.any() for trace in optimizer.traces)


def test_scaling_is_by_what_was_seen_so_far():
    running, values = example.Running(), np.random.default_rng(0).normal(3, 2, (20, 4))
    for value in values:
        running.see(value)
    np.testing.assert_allclose(running.mean, values.mean(0))
    np.testing.assert_allclose(running.spread, values.std(0, ddof=1))


def test_first_weights_are_sparse_and_no_unit_is_blind():
    for inputs in (1, 4, 32):
        linear = example.sparse(torch.nn.Linear(inputs, 16), torch.Generator().manual_seed(0))
        assert (linear.weight.count_nonzero(1) == max(1, inputs - round(0.9 * inputs))).all()
        assert not linear.bias.any()


@pytest.mark.parametrize(("arm", "pushes"), [("streaming", 1), ("streaming, every pass pushes", 2)])
def test_one_pass_pushes_and_every_update_is_heard(arm, pushes):
    agent = example.Agent(example.ARMS[arm], 4, 2, 0)
    norms = [layer for layer in agent.model if isinstance(layer, StreamingNorm)]
    assert len(norms) == 2
    for _ in range(5):
        live(agent, 1, np.random.default_rng(0))
        assert [int(norm.stats.count) for norm in norms] == [pushes] * 2  # each update opened a new window
        assert [int(norm.grads.count) for norm in norms] == [1] * 2


def test_exploring_cuts_the_traces_and_so_does_the_end():
    agent, generator = example.Agent(example.ARMS["layer norm"], 4, 2, 0), np.random.default_rng(0)
    live(agent, 1, generator)
    assert any(trace.any() for trace in agent.optimizer.traces)
    cut = []
    agent.optimizer.forget = lambda: cut.append(True)
    for epsilon, action in ((0.0, "greedy"), (1.0, "any")):
        del cut[:]
        for _ in range(20):
            taken = agent.act(agent.see(generator.standard_normal(4)), epsilon)
            assert len(cut) <= 1
            assert bool(cut) == (taken != int(agent.values.argmax())), action
            del cut[:]
    agent.learn(1.0, agent.see(generator.standard_normal(4)), True, True)
    assert cut
    assert agent.returned == 0


def test_h2_holds_the_gradient_of_the_value_or_that_times_the_error():
    seen = {}
    for arm in ("streaming", "streaming, H2 of error times gradient"):
        agent = example.Agent(example.ARMS[arm], 4, 2, 0)
        with torch.no_grad():  # no weight is zero, so that every gradient is there
            for weight in agent.model.parameters():
                weight.add_(0.1)
        live(agent, 1, np.random.default_rng(0))
        seen[arm] = agent.model[4].grads.short.clone()
    value, loss = seen.values()
    ratio = (loss / value)[value != 0]
    assert len(ratio)
    assert (ratio - ratio[0]).abs().max() < 1e-4 * ratio[0].abs()
    assert abs(ratio[0] - 1) > 1e-3


@pytest.mark.parametrize("guard", [True, False])
def test_the_present_gradient_of_one_element_points_the_other_way(guard):
    """As the page says of beta (0, 0, 1): below the norm every channel gets the opposite sign."""
    norm = StreamingNorm(8, beta=(0, 0, 1), warmup=0, guard=guard)
    optimizer = torch.optim.SGD(norm.parameters(), lr=1e-3)
    torch.manual_seed(0)
    for _ in range(50):
        x = torch.randn(1, 8, requires_grad=True)
        y, dy = norm(x), torch.randn(1, 8)
        y.backward(dy)
        optimizer.step()
    assert (x.grad * dy * norm.weight.detach() < 0).all()


# Running it


def test_a_curve_is_of_the_episodes_that_end_in_each_part():
    assert example.curve("CartPole-v1", [(3, 2.0), (5, 4.0), (9, 6.0)], 20, 4) == [3.0, 6.0, 6.0, 6.0]
    assert example.curve("Acrobot-v1", [(20, -80.0)], 20, 2) == [-500.0, -80.0]


def test_it_runs_and_writes(tmp_path, monkeypatch, capsys):
    page, out, names = tmp_path / "page.md", tmp_path / "out", ["CartPole-v1", "Acrobot-v1"]
    marks = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("agents", *names))
    page.write_text(f"before\n{marks}after\n", encoding="utf-8")
    options = ["--steps", "60", "--seeds", "2", "--env", *names, "--out", str(out), "--page", str(page)]
    arms = ["layer norm", "streaming, every pass pushes", "streaming on the state, layer norm"]
    monkeypatch.setattr(sys, "argv", ["stream_q.py", *options, "--arms", *arms])
    example.main()
    shown, text = capsys.readouterr(), page.read_text(encoding="utf-8")
    assert "12/12" in shown.err
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(results["worlds"]) == names
    for world in results["worlds"].values():
        assert list(world["arms"]) == arms
        assert example.table(world) in text
        assert example.table(world) in shown.out
    assert "old" not in text
    assert example.filled(text, results) == text
    assert "</svg>" in (out / "curves.svg").read_text(encoding="utf-8")
    assert len(list((out / "runs").glob("*.json"))) == 12
    with monkeypatch.context() as patch:  # what is finished is not run again
        patch.setattr(example, "run", None)
        example.main()
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    with pytest.raises(SystemExit, match="no place for agents"):
        example.filled("nothing", results)


@pytest.mark.filterwarnings("ignore:StreamingNorm")  # of passes that push without gradients
@pytest.mark.parametrize("arm", example.ARMS)
def test_every_arm_runs(arm):
    found = example.run("CartPole-v1", example.ARMS[arm], 0, 60)
    assert len(found["curve"]) == example.POINTS
    assert found["score"] > 0


def test_a_run_can_be_repeated():
    one, two = (example.run("CartPole-v1", example.ARMS["layer norm"], 3, 80)["curve"] for _ in range(2))
    assert one == two


def test_it_refuses_less_than_a_curve_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stream_q.py", "--steps", "10"])
    with pytest.raises(SystemExit):
        example.main()
    assert "at least 1 seed and 25 steps" in capsys.readouterr().err


def test_without_gymnasium_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SystemExit, match=r'pip install "streamnorm\[rl\]"'):
        runpy.run_path(str(SCRIPT))


def test_the_page_quotes_the_results():
    results, page = json.loads((RESULTS / "results.json").read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    assert example.filled(page, results) == page
    assert list(results["worlds"]) == list(example.STEPS)
    for name, world in results["worlds"].items():
        assert list(world["arms"]) == example.arms_of(name)
        assert world["steps"] == example.STEPS[name]
        assert all(len(runs) == results["seeds"] >= 3 for runs in world["arms"].values())
    assert "(../results/reinforcement/curves.svg)" in page
    assert (RESULTS / "curves.svg").exists()


def test_layer_norm_learns_and_no_hidden_streaming_norm_does():
    """What the page says of the outcome: every seed with layer norms is above all of those, the means far above."""
    worlds = json.loads((RESULTS / "results.json").read_text(encoding="utf-8"))["worlds"]
    for name, gap in (("CartPole-v1", 100), ("Acrobot-v1", 200)):
        learns, fails, means = [], [], []
        for arm, runs in worlds[name]["arms"].items():
            setting, scores = example.ARMS[arm], [each["score"] for each in runs]
            if setting.hidden is SampleNorm:
                learns += scores
                means.append(fmean(scores))
            elif not setting.after:
                fails += scores
        assert min(learns) > max(fails)
        assert min(means) > max(fails) + gap
