"""Norms of other papers: each equals loops written from its paper, in float64, and trains every net it is for."""

from dataclasses import replace

import numpy as np
import oracle_peers as oracle
import pytest
import torch
import torch.nn.functional as F

from streamnorm.lab import peers
from streamnorm.lab.compare import ALONE, NETS, Entry, norms_of
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run

C = 3
SHAPES = {"vectors": (4, C), "images": (3, C, 2, 2), "one image": (1, C, 2, 3)}
RENORM = (2, 5, 7)
MABN = (3, 1, 5)
PAIRS = {
    "renorm": (
        lambda: peers.BatchRenorm(C, RENORM, rate=0.1, dtype=torch.float64),
        lambda *affine: oracle.Renorm(C, *affine, RENORM, rate=0.1),
        ("mean", "sigma"),
    ),
    "online": (
        lambda: peers.OnlineNorm(C, 0.9, 0.8, dtype=torch.float64),
        lambda *affine: oracle.Online(C, *affine, 0.9, 0.8),
        ("mean", "var", "error_y", "error_1"),
    ),
    "mabn": (
        lambda: peers.MovingAverageBatchNorm(C, MABN, dtype=torch.float64),
        lambda *affine: oracle.Mabn(C, *affine, MABN),
        ("running",),
    ),
    "frn": (
        lambda: peers.FilterResponseNorm(C, dtype=torch.float64),
        lambda *affine: oracle.Frn(C, *affine),
        (),
    ),
}


def close(tensor, array):
    np.testing.assert_allclose(tensor.detach().numpy().reshape(np.shape(array)), array, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PAIRS)
def test_it_equals_the_loops_over_several_steps(name, shape):
    """Output, all gradients and the state, through all parts of a schedule, with gains and biases that change."""
    torch.manual_seed(0)
    make, slow, kept = PAIRS[name]
    layer = make()
    other = slow(layer.weight.detach().numpy(), layer.bias.detach().numpy())  # shares their memory
    for step in range(10):
        with torch.no_grad():
            layer.weight.add_(0.1 * torch.randn(C))
            layer.bias.add_(0.1 * torch.randn(C))
        x = (2 * torch.randn(shape, dtype=torch.float64) + step).requires_grad_()
        g = torch.randn(shape, dtype=torch.float64)
        layer.zero_grad()
        y = layer(x, step=step)
        y.backward(g)
        flat = (shape[0], C, -1)
        close(y, other.forward(x.detach().numpy().reshape(flat)).reshape(shape))
        expected = other.backward(g.numpy().reshape(flat))
        for found, array in zip((x.grad, layer.weight.grad, layer.bias.grad), expected, strict=True):
            close(found, array)
        for each in kept:
            close(getattr(layer, each), np.array(getattr(other, each)))
    if kept:
        close(layer.eval()(x), other.evaluate(x.detach().numpy().reshape(flat)).reshape(shape))


def test_tlu():
    layer = peers.ThresholdedLinear(C).double()
    with torch.no_grad():
        layer.threshold.copy_(torch.tensor([-0.5, 0.0, 0.5]))
    y, g = torch.randn(2, C, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, C, 4, dtype=torch.float64)
    z = layer(y)
    z.backward(g)
    expected = oracle.tlu(y.detach().numpy(), layer.threshold.detach().numpy(), g.numpy())
    for found, array in zip((z, y.grad, layer.threshold.grad), expected, strict=True):
        close(found, array)


@pytest.mark.parametrize("layer", [torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(4, 3)], ids=["conv", "linear"])
def test_centralized_weights(layer):
    layer = layer.double()
    raw = layer.weight.detach().clone().numpy()
    peers.centralize(torch.nn.ModuleDict({"one": layer, "head": torch.nn.Linear(2, 2)}), skip="head")
    close(layer.weight, oracle.centralized(raw))


def test_the_schedule_of_batch_renorm_is_that_of_the_paper():
    layer = peers.BatchRenorm(C)
    bounds = {}
    for calls in (0, 5_000, 15_000, 25_000, 40_000, 90_000):
        layer.calls.fill_(calls)
        bounds[calls] = layer.bounds()
    assert bounds[0] == bounds[5_000] == (1, 0)
    assert bounds[15_000] == pytest.approx((1 + 2 * 10 / 35, 2.5))
    assert bounds[25_000] == pytest.approx((1 + 2 * 20 / 35, 5))
    assert bounds[40_000] == bounds[90_000] == (3, 5)


def test_before_its_schedule_begins_batch_renorm_is_batch_norm():
    x = torch.randn(5, C, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(peers.BatchRenorm(C, dtype=torch.float64)(x), F.batch_norm(x, None, None, training=True))


def test_a_schedule_counts_mini_batches_also_where_a_layer_is_called_at_every_timestep():
    net = build(Run("rows", Norm("mabn", schedule=(4, 10, 20)), width=8, chunk=4))
    (norm,) = net.recurrent.norms_l0.x
    assert norm.schedule == (32, 80, 160)


# Nets


def test_resnet_8_is_what_it_is_called():
    net = build(Run("resnet", Norm("batch"), width=16, side=16))
    convolutions = [layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert sorted(layer.kernel_size for layer in convolutions) == [(1, 1)] * 2 + [(3, 3)] * 7
    assert len([layer for layer in net.modules() if type(layer).__name__ == "GeneralBatchNorm"]) == 9
    x = torch.randn(2, 3, 16, 16)
    h = F.relu(net.norm(net.stem(x)))
    for block, side in zip(net.stages, (16, 8, 4), strict=True):
        branch = block.norm_two(block.two(F.relu(block.norm_one(block.one(h)))))
        h = F.relu(branch + (block.shortcut(h) if len(block.shortcut) else h))
        assert h.shape[2:] == (side, side)
    assert h.shape[1] == 64
    torch.testing.assert_close(net(x), net.head(h.mean((2, 3))))


def test_without_a_norm_branches_begin_at_zero():
    for net in ("resnet", "C"):
        model = build(Run(net, Norm("zero"), width=4))
        gains = [name for name, p in model.named_parameters() if name.endswith("factor") and not p.any()]
        assert len(gains) == {"resnet": 3, "C": 2}[net]
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(model.stages[0][0](x), x)
    assert not any("factor" in name for name, _ in build(Run("C", Norm("none"), width=4)).named_parameters())


def test_tlu_takes_the_place_of_every_relu():
    for net in ("resnet", "C"):
        model = build(Run(net, Norm("frn"), width=4))
        assert not any(isinstance(layer, torch.nn.ReLU) for layer in model.modules())
        F.cross_entropy(model(torch.randn(2, 3, 16, 16)), torch.arange(2)).backward()
        assert all(p.grad is not None for p in model.parameters())


def test_standardized_and_centralized_are_all_weights_but_the_last():
    for norm, standardized in ((Norm("group"), True), (Norm("mabn"), False)):
        for net in ("A", "C", "resnet", *(["rows"] if norm.kind == "mabn" else [])):
            model = build(Run(net, norm, width=8, standardized=standardized))
            weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
            plain = [name for name in weights if "parametrizations" not in name]
            assert [name.split(".")[-2] for name in plain] == ["head"], (net, plain)


@pytest.mark.parametrize("net", NETS)
def test_every_norm_trains(net):
    """The loss on a few images falls, and evaluation gives numbers."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, NETS[net].side, NETS[net].side), torch.arange(4)
    for name in norms_of(net):
        run = Entry(net, name, 8, 1).run(-4, 0)
        model = build(replace(run, width=8))
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.99 * losses[0], (name, losses[0], losses[-1])
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), name
        assert F.cross_entropy(model.eval()(x), y).isfinite(), name


def split_gradients(net, name, samples):
    """Of a window of eight, in batches of `samples`; and the state after a second window."""
    torch.manual_seed(0)
    model = build(replace(Entry(net, name, 8, 1).run(-4, 0), width=8)).double()
    x, y = torch.randn(16, 3, NETS[net].side, NETS[net].side, dtype=torch.float64), torch.arange(16) % 10
    for window in (slice(0, 8), slice(8, 16)):
        model.zero_grad()
        for part, labels in zip(x[window].split(samples), y[window].split(samples), strict=True):
            (F.cross_entropy(model(part), labels, reduction="sum") / 8).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("net", NETS)
def test_to_norms_of_single_samples_all_splits_are_the_same(net):
    """What `Entry.trained` relies on, and nothing more: others do differ."""
    for name in norms_of(net):
        shared = Entry(net, name, 1, 32).trained != Entry(net, name, 1, 32)
        assert shared == (name in ALONE or (name == "Online Norm" and net in ("resnet-8", "fully-connected")))
        if name in ("batch norm", "streaming", "streaming + WS", "Batch Renorm", "MABN"):
            assert not shared
            continue
        one, two = split_gradients(net, name, 8), split_gradients(net, name, 2)
        same = all(torch.allclose(a, b, rtol=1e-7, atol=1e-9) for a, b in zip(one, two, strict=True))
        assert same == shared, name
