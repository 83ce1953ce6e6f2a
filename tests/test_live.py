"""`running_mean` and `running_var`: captured once, they hold what evaluation uses, which uses what is written."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import batch_norm

from streamnorm import GRU, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, to_batchnorm, update_stats

CASES = [
    (StreamingNorm, {}),
    (StreamingNorm, {"eval_memory": 0, "p": 1}),
    (StreamingNorm, {"ref": "SP2", "center": "zero", "affine": False}),
    (StreamingNorm, {"ref": "BA2", "p": 3}),
    (GeneralBatchNorm, {"p": 1.5}),
    (TimeSpecificNorm, {"steps": 1}),
]
KINDS = [StreamingNorm, GeneralBatchNorm]
each_case = pytest.mark.parametrize(("kind", "settings"), CASES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def network(kind, **settings):
    norms = [kind(8, **settings), kind(6, **settings)]
    return nn.Sequential(nn.Linear(4, 8), norms[0], nn.Tanh(), nn.Linear(8, 6), norms[1], nn.Linear(6, 2))


def captured(model, name="running_"):
    """As libraries for reinforcement learning do, once, before training."""
    return [tensor for key, tensor in model.state_dict().items() if name in key]


def polyak(source, target, tau):
    """In place and by `.data`, of which torch counts no versions."""
    with torch.no_grad():
        for new, old in zip(source, target, strict=True):
            old.data.mul_(1 - tau)
            torch.add(old.data, new.data, alpha=tau, out=old.data)


def steps(model, count, scale=3.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        model(torch.randn(5, 4) * scale + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def train(model, count=4, **settings):
    for _ in steps(model, count, **settings):
        pass
    return model


def evaluated(layer, x, mean, var):
    """What code that knows batch norms makes of a layer."""
    flat = [each.expand(1, x.shape[1])[0].contiguous() for each in (mean.detach(), var.detach())]
    return batch_norm(x, *flat, layer.weight, layer.bias, eps=layer.eps)


def streams(layer):
    return {key: value.clone() for key, value in layer.state_dict().items()}


def assert_same(ours, theirs, but=()):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if not key.startswith(but):
            assert torch.equal(value, theirs[key]), key


@each_case
def test_the_evaluation_of_a_target_network_follows(kind, settings):
    source, target = network(kind, **settings), network(kind, **settings).eval()
    target.load_state_dict(source.state_dict())
    lists = captured(source), captured(target)
    assert [len(each) for each in lists] == [4, 4]
    expected = [each.clone() for each in lists[1]]
    x = torch.randn(7, 8)
    for number, _ in enumerate(steps(source, 30)):
        polyak(source.parameters(), target.parameters(), 0.1)
        polyak(*lists, 0.1)
        polyak(lists[0], expected, 0.1)
        if number % 10 == 9:
            source.eval()
            for model, statistics in ((source, lists[0]), (target, expected)):
                torch.testing.assert_close(model[1](x), evaluated(model[1], x, *statistics[:2]))
            source.train()
    # A hard update is exact and leaves the lists in use, whether all of a state_dict is loaded or copied in place.
    entries = source.eval().state_dict()

    def copy_in_place():
        for key, tensor in target.state_dict().items():
            tensor.data.copy_(entries[key])

    for update in (lambda: target.load_state_dict(entries), copy_in_place):
        update()
        assert all(torch.equal(new, old) for new, old in zip(*lists, strict=True))
        assert torch.equal(target(torch.ones(2, 4)), source(torch.ones(2, 4)))
        polyak([tensor + 1 for tensor in lists[0]], lists[1], 0.5)


def test_a_copy_in_place_is_exact():
    """The root of a variance is not always the sigma that it was made of."""
    source, target = StreamingNorm(512, eps=0.1), StreamingNorm(512, eps=0.1).eval()
    held = target.running_var
    for _ in range(99):
        source(torch.randn(7, 512) * torch.logspace(-2, 1, 512))
    for one, two in zip(target.state_dict().values(), source.state_dict().values(), strict=True):
        one.data.copy_(two)
    x = torch.randn(3, 512)
    assert torch.equal(target(x), source.eval()(x))
    assert not torch.equal((held + target.eps).sqrt(), target.sigma)
    assert_same(target.state_dict(), source.state_dict())


@each_case
def test_they_are_live_in_whatever_happens(kind, settings):
    layer, other = kind(4, **settings), train(nn.Sequential(kind(4, **settings), nn.Linear(4, 1)))[0]
    mean, var = layer.running_mean, layer.running_var
    alias = captured(layer)
    x = torch.randn(7, 4)

    def assert_live():
        layer.eval()
        assert layer.running_mean is mean
        torch.testing.assert_close(layer(x), evaluated(layer, x, *alias))
        layer.train()
        assert layer.running_var is var
        assert all(torch.equal(one, two) for one, two in zip(alias, (mean, var), strict=True))

    def trains():
        layer(torch.randn(6, 4) * 3 + 2)

    def forgets():
        layer.load_state_dict(other.state_dict())
        trains()
        layer.reset_running_stats()

    happenings = {
        "call": trains,
        "settings": lambda: setattr(layer, "eps", 0.5),
        "load": lambda: layer.load_state_dict(other.state_dict()),
        "forget": forgets,
        "batch norm": lambda: layer.load_state_dict(
            {"running_mean": torch.ones(4), "running_var": torch.full((4,), 3.0)}, strict=False
        ),
        "one tensor": lambda: setattr(layer, "eval_sigma" if layer.eval_memory else "sigma", layer.sigma * 2),
        "update_stats": lambda: update_stats(layer, [torch.randn(5, 4) * 2 - 1 for _ in range(3)]),
        "as it is": lambda: layer.to("cpu", torch.float32),
    }
    if kind is not StreamingNorm:
        del happenings["one tensor"]  # of which a buffer is not told
    if settings.get("ref") == "BA2" or kind is TimeSpecificNorm:
        del happenings["batch norm"]  # has no place for statistics per channel
    before = None
    for name, happens in happenings.items():
        happens()
        assert_live()
        assert name == "as it is" or before is None or not torch.equal(var, before), name
        before = var.clone()


@each_kind
def test_the_same_tensors_are_bound_to_a_spatial_size(kind):
    layer = kind(3, ref="BA6")
    mean, var = layer.running_mean, layer.running_var
    x = torch.randn(5, 3, 2, 4)
    layer(x)
    assert mean is layer.running_mean
    assert mean.shape == var.shape == (3, 2, 4)
    mean.data.add_(1)
    torch.testing.assert_close(layer.eval()(x), (x - mean) / (var + layer.eps).sqrt())
    layer.reset_running_stats()
    assert mean.shape == (0,)


def test_a_whole_sequence_moves_them():
    model = GRU(3, 4)
    norms = [module for module in model.modules() if isinstance(module, StreamingNorm)]
    lists = captured(model)
    model(torch.randn(5, 2, 3))[0].sum().backward()
    for norm, mean, var in zip(norms, lists[::2], lists[1::2], strict=True):
        assert torch.equal(mean, norm.eval_mean)
        torch.testing.assert_close(var, norm.eval_sigma.square() - norm.eps)
    model.eval()
    x, other = torch.randn(5, 2, 3), copy.deepcopy(model)
    with torch.no_grad():
        before = model(x)[0]
        for mean in lists[::2]:
            mean.data.add_(1)
        for norm in other.modules():
            if isinstance(norm, StreamingNorm):
                norm.running_mean.add_(1)
        after = model(x)[0]
        assert not torch.allclose(before, after)
        assert torch.equal(after, other(x)[0])
        assert torch.equal(after, copy.deepcopy(model)(x)[0])


@each_case
def test_training_neither_notices_readers_nor_depends_on_them(kind, settings):
    ours, theirs = network(kind, **settings), network(kind, **settings)
    theirs.load_state_dict(ours.state_dict())
    held = captured(ours)
    for model in (ours, theirs):
        torch.manual_seed(3)
        train(model)
    assert_same(ours.state_dict(), theirs.state_dict())
    assert torch.equal(ours.eval()(torch.ones(1, 4)), theirs.eval()(torch.ones(1, 4)))
    assert len(held) == 4


@each_kind
def test_a_write_serves_evaluation(kind):
    """Also of copies, of what is saved, and of what is deployed; others are left alone."""
    model, x = train(network(kind)), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[1].running_mean.data.copy_(torch.randn(8))
        model.state_dict()["1.running_var"].copy_(torch.rand(8) + 0.5)  # held by nobody afterwards
    y = model.eval()(x)
    torch.testing.assert_close(y, torch.nn.Sequential(to_batchnorm(model, example=x, report=None))(x))
    loaded = network(kind).eval()
    loaded.load_state_dict(model.state_dict())
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(duplicate(x), y)
    assert not torch.allclose(twin.eval()(x), y)


@each_kind
def test_what_nobody_holds_any_more_costs_nothing(kind):
    """A state_dict that was saved leaves no trace; what was asked for by its name stays the same tensor."""
    for mode in (True, False):
        layer = kind(4).train(mode)
        kept = layer.state_dict()
        layer(torch.randn(5, 4))
        assert layer._live is not None
        alias = kept["running_var"].data
        del kept
        layer(torch.randn(5, 4))
        assert layer._live is not None
        del alias
        layer(torch.randn(5, 4))
        assert layer._live is None
    layer.state_dict()["running_mean"].fill_(2.0)  # but a write is not lost
    assert layer(torch.full((5, 4), 2.0)).abs().max() < 1e-6
    assert layer._live is None
    address = layer.running_mean.data_ptr()
    layer.train()(torch.randn(5, 4))
    assert layer.running_mean.data_ptr() == address


@pytest.mark.parametrize("settings", [{}, {"center": "mean", "p": 1}, {"warmup": 0, "guard": False}])
def test_the_next_training_call_goes_by_the_streams(settings):
    ours, theirs = (train(network(StreamingNorm, **settings)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    ours[1].running_mean.data.add_(5)
    for model in (ours, theirs):
        torch.manual_seed(3)
        train(model)
    assert_same(ours.state_dict(), theirs.state_dict())


def test_batch_norms_go_on_from_a_write():
    """As those of torch do."""
    ours, theirs = GeneralBatchNorm(4, momentum=0.5), nn.BatchNorm1d(4, momentum=0.5)
    for norm in (ours, theirs):
        norm(torch.randn(6, 4))
        norm.running_mean.fill_(2.0)
        norm(torch.full((6, 4), 1.0))
        assert norm.running_mean.tolist() == [1.5] * 4


@each_kind
def test_what_is_set_in_their_place(kind):
    layer = kind(4).eval()
    x, mine = torch.randn(3, 4), torch.ones(4)
    layer.running_mean = mine
    assert layer.running_mean is mine
    torch.testing.assert_close(layer(x), x - 1)
    layer.train()(torch.randn(5, 4))
    torch.testing.assert_close(layer.eval()(x), evaluated(layer, x, mine, layer.running_var))
    layer.running_var = torch.full((4,), 3.0)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    with torch.no_grad():
        layer.running_mean += 1
    deployed = to_batchnorm(nn.Sequential(layer), inplace=True, report=None)
    torch.testing.assert_close(deployed(x), layer(x))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    torch.testing.assert_close(layer(x), (x - mine) / (3 + layer.eps) ** 0.5)
    assert not hasattr(SampleNorm(4), "running_mean")


def test_what_cannot_be_set_in_their_place():
    layer = StreamingNorm(4)
    before = layer.running_mean
    for value, error in ((None, TypeError), (torch.ones(3), ValueError)):
        with pytest.raises(error, match=r"running_mean .*\(4,\)"):
            layer.running_mean = value
    assert layer.running_mean is before
    layer.running_var = nn.Parameter(torch.full((4,), 3.0))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert layer.running_var.tolist() == [3.0] * 4


@each_kind
def test_functional_calls_leave_nothing_behind(kind):
    """With all of another model's state, in any order, or one tensor of it, which can be differentiated."""
    ours, theirs = (train(network(kind)).eval() for _ in range(2))
    held, x = ours[1].running_mean, torch.randn(3, 4)
    before, wanted = ours(x), theirs(x)
    mine, given = streams(ours), streams(theirs)
    for order in (given, dict(reversed(given.items()))):
        assert torch.equal(functional_call(ours, order, (x,)), wanted)
        assert_same(order, theirs.state_dict())
        assert_same(ours.state_dict(), mine)
        assert ours[1].running_mean is held
    slope = torch.func.grad(lambda mean: functional_call(ours, {"1.running_mean": mean}, (x,)).sum())(held + 1)
    assert slope.abs().min() > 0
    assert torch.equal(ours(x), before)
    assert ours[1].running_mean is held


@each_kind
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this")
def test_compiled(kind):
    """Eager and compiled go the same way; for a streaming norm in training, capturing makes no new graph."""
    torch._dynamo.reset()
    ours, theirs = network(kind)[:2], network(kind)[:2]
    theirs.load_state_dict(ours.state_dict())
    called = torch.compile(theirs, backend="aot_eager", fullgraph=True)
    lists = (captured(ours), captured(theirs)) if kind is GeneralBatchNorm else ([], [])
    for seed in range(4):
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            for model in (ours, called):
                torch.manual_seed(seed)
                train(model, 1)
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(*lists, strict=True))
        if seed == 1:
            lists = captured(ours), captured(theirs)
            for each in lists:
                polyak([torch.full_like(tensor, 2.0) for tensor in each], each, 0.5)
    x = torch.randn(3, 4)
    ours.eval(), theirs.eval()
    for _ in range(2):
        torch.testing.assert_close(called(x), ours(x))
        for each in lists:
            polyak([tensor + 1 for tensor in each], each, 0.5)


def test_a_layer_outlives_a_transform():
    """It goes on training after all of its state was given to a call that was differentiated."""
    ours = train(network(StreamingNorm)).eval()
    theirs, x = copy.deepcopy(ours), torch.randn(3, 4)
    given = {key: value.clone() for key, value in theirs.state_dict().items()}

    def loss(weight):
        return functional_call(ours, given | {"1.weight": weight}, (x,)).square().sum()

    torch.func.grad(loss)(torch.ones(8))
    torch.func.vmap(loss)(torch.ones(2, 8))
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(3)
        train(model)
    assert_same(ours.state_dict(), theirs.state_dict())


def test_a_convolution_takes_them_in():
    """torch's own function for it, which reads a batch norm by its attributes."""
    conv, norm = nn.Conv2d(3, 4, 3), StreamingNorm(4)
    for _ in range(3):
        norm(conv(torch.randn(2, 3, 6, 6) + 1)).sum().backward()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, 6)
    fused = nn.utils.fuse_conv_bn_eval(conv.eval(), norm.eval())
    torch.testing.assert_close(fused(x), norm(conv(x)), atol=1e-5, rtol=1e-5)
