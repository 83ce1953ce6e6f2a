"""The monitor reports what its definitions say, leaves no trace, and its numbers reach TensorBoard and a picture."""

import copy
import math
import sys
from dataclasses import asdict

import pytest
import torch
from streamnorm.kernels import disabled
from torch import nn

import streamnorm
from streamnorm import StreamingNorm, monitor
from streamnorm.lab.health import health as lab_health


class Shared(nn.Module):
    """One norm in two places, one inside a recurrent layer, and one that keeps statistics per location."""

    def __init__(self, **settings):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = StreamingNorm(8, **settings)
        self.again = nn.Sequential(nn.Linear(8, 8), self.norm)
        self.images = StreamingNorm(2, ref="BA6")
        self.rnn = streamnorm.RNN(4, 5)

    def forward(self, x):
        h = self.again(torch.relu(self.norm(self.first(x))))
        h = self.images(h.reshape(-1, 2, 4))
        return self.rnn(h.transpose(0, 1))[0].mean()


def train(model, updates=4, batches=2, watch=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(updates):
        for _ in range(batches):
            loss = (model(torch.randn(4, 6)) - 1).square()
            if watch:
                watch(model)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if watch:
            watch(model)
    return losses


def trained(*layers, updates=5, scale=1.0, size=16):
    """Only the norm learns: the activations that come to it are of the same kind all the time."""
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=1e-3)
    for _ in range(updates):
        model(scale * torch.randn(size, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("plain", [False, True])
def test_training_goes_on_as_if_nobody_had_looked(plain):
    watched = Shared()
    alone = copy.deepcopy(watched)
    if plain:
        with disabled():
            losses = [train(watched, watch=monitor), train(alone)]
    else:
        losses = [train(watched, watch=lambda model: str(monitor(model))), train(alone)]
    assert losses[0] == losses[1]
    for (name, a), b in zip(watched.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_looking_does_not_make_the_layer_copy_its_state():
    model = trained(nn.Linear(3, 4), StreamingNorm(4))
    model(torch.randn(2, 3))
    before = model[1]._state.mean.data_ptr()
    monitor(model)
    model(torch.randn(2, 3))
    assert model[1]._state.mean.data_ptr() == before
    looked = monitor(model)
    then = str(looked), copy.deepcopy(looked._details["1"])
    trained(*model)
    assert str(looked) == then[0]
    assert torch.equal(looked._details["1"], then[1])


def test_every_layer_is_there_once():
    model = Shared()
    norms = [name for name, module in model.named_modules() if isinstance(module, StreamingNorm)]
    health = monitor(model)
    assert list(health) == norms
    assert {"norm", "images"} < set(health)
    assert "again.1" not in health
    assert any(name.startswith("rnn.") for name in health)
    assert health["images"].channels == 0  # not bound to a spatial size yet
    assert health["images"].notes == ["never called"]
    train(model, batches=3)
    health = monitor(model)
    assert health["images"].channels == 8
    assert health["norm"].calls == 6  # twice per batch
    assert all(math.isfinite(layer.gradient_ratio) for layer in health.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_of_one_kind_are_told_apart(dtype):
    """They are measured together; alone each has the same numbers, whatever stands beside it."""
    kinds = [
        {},
        {},
        {"ref": "BA2"},
        {"ref": "BA6"},
        {"p": 1},
        {"beta": (0.0, 0.0, 1.0)},
        {"warmup": 0},
        {"eps": 0.1},
        {},
    ]
    model = nn.Sequential(*(StreamingNorm(4, **kind) for kind in kinds), nn.ReLU()).to(dtype)
    model[1].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(3 * torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    health = monitor(model)
    assert list(health) == [str(i) for i in range(len(kinds))]
    for name, layer in health.items():
        alone = asdict(monitor(model[int(name)])[""])
        assert alone == pytest.approx(asdict(layer), rel=1e-5)


def test_a_model_without_streaming_layers():
    health = monitor(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not health
    assert str(health) == "no streaming layer in this model"
    with pytest.raises(ValueError, match="nothing to draw"):
        health.plot()


@pytest.mark.parametrize("beta", [(0.7, 0.3, 0.0), (0.5, 0.1, 0.4), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("guard", [True, False])
def test_the_numbers_follow_their_definitions(beta, dtype, guard):
    """Written out once more, channel by channel, from the streams that the layer shows."""
    norm = StreamingNorm(4, beta=beta, warmup=0, guard=guard, dtype=dtype)
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(torch.randn(8, 3, dtype=dtype)) - 1).square().mean().backward()
        optimizer.step()
    found = monitor(model)["1"]
    (short_mean, short_sigma), (long_mean, long_sigma) = norm.stats.short.tolist(), norm.stats.long.tolist()
    four = range(4)
    assert found.drift_mean == pytest.approx(max(abs(short_mean[c] - long_mean[c]) / long_sigma[c] for c in four), 1e-5)
    assert found.drift_sigma == pytest.approx(max(abs(short_sigma[c] / long_sigma[c] - 1) for c in four), 1e-4)
    true, long = norm.grads.short.flatten().tolist(), norm.grads.long.flatten().tolist()
    short = beta[1] * (8 / 256) ** (2 / 3) if guard and beta[0] else beta[1]  # windows of 8 elements
    streamed = [(beta[0] + beta[1] - short) * a + (short + beta[2]) * b for a, b in zip(long, true, strict=True)]
    if guard:
        bound = min(1, math.hypot(*true) / math.hypot(*streamed))
        streamed = [bound * value for value in streamed]
    assert found.gradient_ratio == pytest.approx(math.hypot(*streamed) / math.hypot(*true), 1e-5)
    product = sum(a * b for a, b in zip(streamed, true, strict=True))
    assert found.gradient_cosine == pytest.approx(product / math.hypot(*streamed) / math.hypot(*true), 1e-5)
    sigma = sorted(norm.sigma.tolist())
    assert [found.sigma_min, found.sigma_median, found.sigma_max] == pytest.approx([sigma[0], sigma[1], sigma[3]], 1e-6)
    assert (found.dead, found.exploding, found.calls, found.warm, found.heard) == (0, 0, 1, 1, True)


def test_a_gradient_that_is_its_own_past_is_streamed_as_it_is():
    """beta=(0, 0, 1) passes the true gradient on, and one window is its own past."""
    for settings in ({"beta": (0.0, 0.0, 1.0)}, {}):
        model = trained(nn.Linear(3, 4), StreamingNorm(4, warmup=0, **settings), updates=1 + 4 * bool(settings))
        assert monitor(model)["1"].gradient_ratio == pytest.approx(1)
        assert monitor(model)["1"].gradient_cosine == pytest.approx(1)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_dead_and_exploding_channels(p, scale):
    linear = nn.Linear(3, 7)
    with torch.no_grad():
        linear.weight[2] = 0  # says always the same
        linear.weight[4] *= 1e4  # is far above the others
    norm = StreamingNorm(7, p=p, center="mean")
    health = monitor(trained(linear, norm, updates=60, scale=scale))
    assert (health["1"].dead, health["1"].exploding) == (1, 1)
    assert health["1"].sigma_min == pytest.approx(math.sqrt(norm.eps), rel=0.1)
    assert health["1"].notes == ["1 of 7 dead", "1 of 7 exploding"]
    healthy = monitor(trained(nn.Linear(3, 7), StreamingNorm(7, p=p), updates=20, scale=scale))["1"]
    assert (healthy.dead, healthy.exploding, healthy.notes) == (0, 0, [])


def test_living_channels_do_not_explode_beside_many_dead_ones():
    linear = nn.Linear(3, 7)
    with torch.no_grad():
        linear.weight[:5] = 0
    health = monitor(trained(linear, StreamingNorm(7, center="mean"), updates=60))["1"]
    assert (health.dead, health.exploding) == (5, 0)


def test_a_layer_that_grows_as_a_whole_explodes():
    model = trained(nn.Linear(3, 7), StreamingNorm(7))
    trained(*model, scale=1e3, updates=1)
    assert monitor(model)["1"].exploding == 7


def test_what_a_layer_went_through():
    norm = StreamingNorm(4, affine=False)
    model = nn.Sequential(nn.Linear(3, 4), norm)

    def notes():
        return monitor(model)["1"].notes

    assert notes() == ["never called"]
    model(torch.randn(64, 3)).sum().backward()
    assert notes() == ["warming up (25%)", "no update heard of yet"]
    model(torch.randn(300, 3))
    assert notes() == ["no update heard of yet"]
    norm.weights_updated()
    assert notes() == []
    model(torch.full((2, 3), math.nan))
    assert notes() == ["no finite call in this window"]
    model(torch.randn(2, 3))
    assert notes() == []
    other = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4, affine=False))
    other.load_state_dict(model.state_dict())  # a new process has heard of nothing, its checkpoint has
    assert monitor(other)["1"].notes == []


@pytest.mark.parametrize("exponent", [-110, -70, 70, 110])
@pytest.mark.parametrize("size", [2, 40])
def test_the_scale_of_the_loss_does_not_show(exponent, size):
    """In small windows, which bound the streamed gradient, and in full ones."""
    found = []
    for scale in (1.0, 2.0**exponent):
        norm, generator = StreamingNorm(3), torch.Generator().manual_seed(0)
        for _ in range(6):
            x, dy = (torch.randn(size, 3, generator=generator) for _ in range(2))
            norm(x).backward(dy * scale)
            norm.weights_updated()
        found.append(monitor(norm)[""])
    assert all(math.isfinite(each.gradient_ratio) and each.gradient_ratio > 0 for each in found)
    assert found[1].gradient_ratio == pytest.approx(found[0].gradient_ratio, rel=1e-5)
    assert found[1].gradient_cosine == pytest.approx(found[0].gradient_cosine, rel=1e-5)


def turned(sign):
    """A layer whose gradient was one thing in the past and is `sign` times that now."""
    norm, x, dy = StreamingNorm(4, warmup=0), *torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(0))
    for direction in (1, 1, 1, sign):
        norm(x).backward(direction * dy)
        norm.weights_updated()
    return nn.Sequential(norm)


def test_a_streamed_gradient_that_points_away_is_said(tmp_path):
    assert monitor(turned(1))["0"].notes == []
    health = monitor(turned(-1))
    assert health["0"].gradient_cosine < -0.9
    (note,) = health["0"].notes
    assert note == f"streamed gradient points away from the true one (cosine {health['0'].gradient_cosine:.2f})"
    assert note in str(health)
    pytest.importorskip("matplotlib")
    (label,) = health.plot().axes[0].get_yticklabels()
    assert note in label.get_text()
    assert label.get_color() != monitor(turned(1)).plot().axes[0].get_yticklabels()[0].get_color()
    marks = [line for line in health.plot().axes[2].get_lines() if line.get_marker() == "x"]
    assert [line.get_color() for line in marks] == [label.get_color()]


@pytest.mark.filterwarnings("ignore:.*distutils", "ignore:.*utcfromtimestamp")
def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = Shared()
    with SummaryWriter(tmp_path) as writer:
        monitor(model).log(writer, 0)  # gradients are not a number yet and are left out
        train(model)
        health = monitor(model)
        health.log(writer, 4)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(health.scalars()) == set(events.Tags()["scalars"])
    for name, value in health.scalars().items():
        last = events.Scalars(name)[-1]
        assert (last.step, last.value) == (4, pytest.approx(value))
    assert health.scalars("a")["a/drift_sigma/norm"] == health["norm"].drift_sigma
    assert [event.step for event in events.Scalars("streamnorm/gradient_ratio/norm")] == [4]
    assert "streamnorm/drift_mean/norm" in monitor(model).scalars()


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    model = Shared()
    monitor(model).plot(tmp_path / "new.png")
    train(model)
    health = monitor(model)
    figure = health.plot(tmp_path / "trained.png")
    assert (tmp_path / "trained.png").read_bytes().startswith(b"\x89PNG")
    spread, drift, gradient = figure.axes
    assert [label.get_text() for label in spread.get_yticklabels()] == [
        "\n".join([name, ", ".join(layer.notes)]).strip() for name, layer in health.items()
    ]
    ratios = [line.get_xdata()[0] for line in gradient.get_lines() if line.get_marker() == "o"]
    assert ratios == [layer.gradient_ratio for layer in health.values()]
    shown = [max(line.get_xdata()) for line in drift.get_lines() if line.get_marker() == "|"]
    assert shown == [value for layer in health.values() for value in (layer.drift_mean, layer.drift_sigma)]


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"streamnorm\[lab\]"):
        monitor(StreamingNorm(2)).plot()


def test_the_lab_logs_the_same_drift():
    model = Shared()
    assert lab_health(model, 0.0)["drift"] == 0
    train(model)
    layers = [module for module in model.modules() if isinstance(module, StreamingNorm)]
    drifts = [float((norm.stats.short[1] / norm.stats.long[1] - 1).abs().max()) for norm in layers]
    assert lab_health(model, 0.0)["drift"] == max(drifts)


def test_a_layer_that_was_given_statistics_has_not_heard_of_an_update():
    trained = nn.BatchNorm1d(4, affine=False)
    trained(torch.randn(8, 4))
    model = streamnorm.convert(nn.Sequential(trained), report=None)
    model(torch.randn(8, 4))
    assert monitor(model)["0"].notes == ["no update heard of yet"]
