"""The memory for evaluation: what evaluation averages over, that training does not depend on it, who follows it."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from streamnorm import (
    GRU,
    RNN,
    GeneralBatchNorm,
    RNNCell,
    StreamingNorm,
    backends,
    convert,
    fuse,
    paused,
    to_batchnorm,
    update_stats,
)
from streamnorm.core.state import FIELDS, to_dict
from streamnorm.functional import Config, new_state, streaming_norm, weights_updated

PLACES = [name for name in backends.available() if name != "torch_ops"]
OF_EVALUATION = {"eval_long", "eval_mean", "eval_sigma"}


def trained(norm, windows, size, seed=0):
    """Outputs and gradients of a training with small weights after it, so that its statistics move."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for calls in windows:
        for n in calls:
            x = torch.randn(n, *size, generator=generator).requires_grad_()
            y = norm(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        norm.weights_updated()
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [(3,), (3, 4, 4)], ids=["rows", "images"])
def test_training_does_not_depend_on_it(place, size):
    windows = [[2], [1, 1, 3], [7], [2], [40], [1]] * 3
    with backends.use(place):
        layers = [StreamingNorm(3, eval_memory=memory) for memory in (None, 0, 5, 1000)]
        results = [trained(layer, windows, size) for layer in layers]
    for layer, found in zip(layers, results, strict=True):
        assert all(map(torch.equal, found, results[0]))
        for name, tensor in to_dict(layer.state).items():
            if name not in OF_EVALUATION:
                assert torch.equal(tensor, to_dict(layers[0].state)[name]), name


@pytest.mark.parametrize("place", PLACES)
def test_evaluation_averages_over_that_many_samples(place):
    """Windows of n samples: an exponential average with the weight n / eval_memory, exact at first."""
    torch.manual_seed(0)
    norm = StreamingNorm(1, warmup=0, eval_memory=50, alpha=(0.5, 0.5), affine=False)
    data = torch.randn(60, 4, 1, 8, 8) + torch.randn(60, 1, 1, 1, 1)
    means = data.mean((1, 2, 3, 4))
    expected = means[0]
    with backends.use(place):
        for k, x in enumerate(data):
            norm(x)
            if k:
                shown = expected + 4 / 50 * (means[k] - expected)  # the window that is not folded yet
                torch.testing.assert_close(norm.eval_mean[0], shown, rtol=1e-4, atol=1e-5)
                expected = expected + max(4 / 50, 1 / (k + 1)) * (means[k] - expected)
            norm.weights_updated()
    y = norm.eval()(data[0])
    by_hand = (data[0] - norm.eval_mean.reshape(1, 1, 1, 1)) * (1 / norm.eval_sigma.reshape(1, 1, 1, 1))
    torch.testing.assert_close(y, by_hand)


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_operation_and_many_evaluate_alike(kind, scale, layout):
    """Plain inputs are evaluated by one operation of torch's; those with a mask are not."""
    norm = kind(5, eps=0.0)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = ((torch.randn(4, 5, 3, 3) + 3) * scale).to(memory_format=layout)
    norm(x)
    norm.eval()
    found = []
    for mask in (None, torch.ones(4, 3, 3, dtype=torch.bool)):
        given = x.clone().requires_grad_()
        y = norm(given, mask)
        y.backward(x / scale)
        found.append((y.detach(), given.grad, norm.weight.grad, norm.bias.grad))
        norm.zero_grad(set_to_none=True)
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5 * float(many.abs().max()))
    assert found[0][0].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("place", PLACES)
def test_windows_of_many_samples_are_tested_by_the_latest(place):
    """From 0.3 * 64 samples on, and in windows of any size with eval_memory=0 or the paper's rule."""
    with backends.use(place):
        for norm, windows in (
            (StreamingNorm(3), [[20], [32], [64]]),
            (StreamingNorm(3), [[1] * 32, [4] * 8]),
            (StreamingNorm(3, eval_memory=0), [[1], [2], [1, 1]]),
            (StreamingNorm(3, guard=False), [[1], [2], [1, 1]]),
            (StreamingNorm(3, alpha=(0, 1)), [[3], [2], [4]]),  # no long memory to lean on
        ):
            trained(norm, windows * 4, (3, 5, 5))
            assert torch.equal(norm.eval_mean, norm.mean)
            assert torch.equal(norm.eval_sigma, norm.sigma)
        small = StreamingNorm(3)
        trained(small, [[2]] * 12, (3, 5, 5))
        assert not torch.equal(small.eval_mean, small.mean)


def test_it_is_quiet_where_windows_are_small():
    torch.manual_seed(1)
    norm, seen = StreamingNorm(4), {"mean": [], "eval_mean": []}
    for _ in range(600):
        norm((torch.randn(2, 4, 6, 6) + torch.randn(2, 4, 1, 1)).requires_grad_()).sum().backward()
        norm.weights_updated()
        for name, values in seen.items():
            values.append(getattr(norm, name))
    noise = {name: torch.stack(values[200:]).std(0).mean() for name, values in seen.items()}
    assert noise["eval_mean"] < 0.7 * noise["mean"]


def test_it_can_be_set_and_is_checked():
    norm = StreamingNorm(3)
    assert norm.eval_memory == 64
    assert StreamingNorm(3, guard=False).eval_memory == 0
    assert "eval_memory" not in repr(norm)
    assert "eval_memory=0.0" in repr(StreamingNorm(3, eval_memory=0))
    trained(norm, [[1]] * 9, (3, 4))
    x = torch.randn(2, 3, 4)
    long = norm.eval()(x)
    norm.eval_memory = 0
    assert not torch.allclose(norm(x), long)
    norm.eval_memory = 64
    assert torch.equal(norm(x), long)
    for bad in (-1, float("nan"), float("inf"), "64", True):
        with pytest.raises(ValueError, match="eval_memory"):
            StreamingNorm(3, eval_memory=bad)
        with pytest.raises(ValueError, match="eval_memory"):
            norm.eval_memory = bad
    assert norm.eval_memory == 64


def test_paused_calls_of_training_use_the_latest():
    norm = StreamingNorm(3)
    trained(norm, [[1]] * 9, (3, 4))
    x = torch.randn(2, 3, 4)
    with paused(norm):
        latest = norm(x)
    other = copy.deepcopy(norm)
    other.eval_memory = 0
    assert torch.equal(latest, other.eval()(x))
    assert not torch.allclose(latest, norm.eval()(x))


@pytest.mark.parametrize("layer", [RNN, GRU])
def test_recurrent_layers_too(layer):
    """The whole sequence by the kernels is the loop; a state that goes on brings no new samples."""
    torch.manual_seed(0)
    fused = layer(3, 4, bidirectional=True, norm=partial(StreamingNorm, eval_memory=500))
    plain, x = copy.deepcopy(fused), torch.randn(7, 2, 3)
    for _ in range(12):
        data = torch.randn(7, 2, 3)
        for net, place in ((fused, PLACES[0]), (plain, "plain")):
            with backends.use(place):
                _, state = net(data)
                net(data[:3], state)[0].sum().backward()
            for norm in net.modules():
                if isinstance(norm, StreamingNorm):
                    assert int(norm.samples) == int(norm.elements) == 2
                    norm.weights_updated()
    with torch.no_grad(), backends.use(PLACES[0]):
        whole = fused.eval()(x)[0]
    with torch.no_grad(), backends.use("plain"):
        torch.testing.assert_close(plain.eval()(x)[0], whole)
    for norm in fused.modules():
        if isinstance(norm, StreamingNorm):
            norm.eval_memory = 0
    with torch.no_grad():
        assert not torch.allclose(fused(x)[0], whole)


def test_a_cell_counts_first_steps():
    cell = RNNCell(3, 4)
    h = None
    for t in range(5):
        h = cell(torch.randn(2, 3), h, step=t)
    assert {int(norm.samples) for norm in cell.modules() if isinstance(norm, StreamingNorm)} == {2}


def small_net():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), StreamingNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(15):
        net(torch.randn(1, 3, 6, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr", "ignore:Node ")  # of torch 2.4, about itself
def test_what_is_made_for_deployment_evaluates_alike():
    net, x = small_net(), torch.randn(5, 3, 6, 6)
    with torch.no_grad():
        expected = net(x)
        net[1].eval_memory = 0
        latest = net(x)
        net[1].eval_memory = 64
        assert not torch.allclose(expected, latest, atol=1e-4)
        torch.testing.assert_close(to_batchnorm(copy.deepcopy(net))(x), expected)
        torch.testing.assert_close(fuse(copy.deepcopy(net), example=x)(x), expected)
        torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), expected)
        torch.testing.assert_close(torch.compile(net, backend="eager", fullgraph=True)(x), expected)


def test_update_stats_sets_what_evaluation_uses():
    net = small_net()
    update_stats(net, [torch.randn(4, 3, 6, 6) for _ in range(4)])
    assert torch.equal(net[1].eval_mean, net[1].mean)
    assert torch.equal(net[1].eval_sigma, net[1].sigma)
    assert torch.equal(net[1].eval_long, net[1].stats_long)


def test_a_batch_norm_hands_its_statistics_over():
    batchnorm = nn.BatchNorm2d(3)
    for _ in range(9):
        batchnorm(torch.randn(8, 3, 4, 4) * 3 + 2)
    x, norm = torch.randn(2, 3, 4, 4), convert(nn.Sequential(copy.deepcopy(batchnorm)), report=None)[0]
    torch.testing.assert_close(norm.eval()(x), batchnorm.eval()(x))
    torch.testing.assert_close(norm.eval_long[0], batchnorm.running_mean)
    trained(norm.train(), [[1]] * 3, (3, 4, 4))
    assert (norm.eval_mean - 2).abs().max() < (norm.mean - 2).abs().max()  # other data do not carry it away at once


def test_it_is_saved_and_a_state_without_it_loads():
    norm, x = StreamingNorm(3), torch.randn(2, 3)
    trained(norm, [[1]] * 9, (3, 4))
    saved = io.BytesIO()
    torch.save(norm.state_dict(), saved)
    saved.seek(0)
    other = StreamingNorm(3)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other.eval()(x), norm.eval()(x))
    old = {
        name: value for name, value in norm.state_dict().items() if name not in OF_EVALUATION | {"samples", "counted"}
    }
    assert other.load_state_dict(old) == ([], [])
    assert torch.equal(other.eval_long, other.stats_long)
    norm.eval_memory = 0
    assert torch.equal(other(x), norm(x))


def test_the_function_follows():
    norm, state, config = StreamingNorm(3, affine=False), new_state(3), Config()
    for k in range(9):
        x = torch.randn(1, 3, 4)
        norm(x, step=k % 2)
        _, state = streaming_norm(x, state, step=k % 2)
        norm.weights_updated()
        state = weights_updated(state)
    for name in FIELDS:
        torch.testing.assert_close(to_dict(norm.state)[name], to_dict(state)[name], msg=name)
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(streaming_norm(x, state, config, training=False)[0], norm.eval()(x))
    latest = streaming_norm(x, state, Config(eval_memory=0), training=False)[0]
    norm.eval_memory = 0
    torch.testing.assert_close(latest, norm(x))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_a_compiled_layer_counts_alike():
    norm = StreamingNorm(3)
    compiled = copy.deepcopy(norm)
    call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for k in range(6):
        x = torch.randn(2, 3, 4)
        norm(x, step=k % 3).sum().backward()
        call(x, step=k % 3).sum().backward()
        if k % 3 == 2:
            norm.weights_updated()
            compiled.weights_updated()
    for name in ("samples", "elements", "counted", "eval_mean", "eval_sigma"):
        torch.testing.assert_close(getattr(compiled, name), getattr(norm, name), msg=name)
