"""One contract for every public layer: what a module of PyTorch is expected to do."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import streamnorm
from streamnorm import GeneralBatchNorm, NormRef, SampleNorm, StreamingNorm, TimeSpecificNorm
from streamnorm.core.reference import CODES

LAYERS = {
    "StreamingNorm": lambda **kw: StreamingNorm(4, **kw),
    "StreamingNorm-SP1": lambda **kw: StreamingNorm(4, ref="SP1", p=1, **kw),
    "StreamingNorm-BA4": lambda **kw: StreamingNorm(4, ref="BA4", center="mean", **kw),
    "GeneralBatchNorm": lambda **kw: GeneralBatchNorm(4, **kw),
    "GeneralBatchNorm-BA6": lambda **kw: GeneralBatchNorm(4, ref="BA6", p=3, center="running", **kw),
    "SampleNorm": lambda **kw: SampleNorm(4, **kw),
    "SampleNorm-SP3": lambda **kw: SampleNorm(4, ref="SP3", p=1, **kw),
    "TimeSpecificNorm": lambda **kw: TimeSpecificNorm(4, 3, **kw),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@every_layer
def test_shapes(make):
    for shape in [(3, 4), (3, 4, 5), (3, 4, 5, 6), (3, 4, 2, 3, 4)]:
        layer = make()
        x = torch.randn(shape, requires_grad=True)
        original = x.detach().clone()
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert torch.equal(x, original)  # inputs are never changed
        assert layer.eval()(x).shape == shape


@every_layer
def test_copies(make):
    layer = make()
    x = torch.randn(3, 4, 5)
    layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.eval()(x), layer.eval()(x))
        twin.train()(x + 1)
        layer.train()
    fresh = make()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.eval()(x), layer.eval()(x))


@every_layer
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gain_or_bias_that_is_made_of_others_serves_every_call(make, name):
    """The first call after it was parametrized, and those that follow."""

    class Doubled(nn.Module):
        def forward(self, vector):
            return 2 * vector

    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    twin = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, name, Doubled())
    getattr(twin, name).data.mul_(2)
    for training in (True, False):
        layer.train(training)
        twin.train(training)
        for _ in range(3):
            x = torch.randn(8, 4, 3)
            torch.testing.assert_close(layer(x), twin(x))
            with torch.no_grad():
                torch.testing.assert_close(layer(x), twin(x))


@every_layer
def test_unrolled_use(make):
    """Called several times before one backward pass, as a recurrent network does."""
    layer = make()
    h = start = torch.randn(3, 4, 5, requires_grad=True)
    for step in range(4):
        h = torch.tanh(layer(h, step=step))
    h.sum().backward()
    assert torch.isfinite(start.grad).all()
    assert torch.isfinite(layer.weight.grad).all()


@every_layer
def test_double_backward_is_refused(make):
    layer = make()
    x = torch.randn(3, 4, 5, requires_grad=True)
    layer(x).sum().backward()
    y = layer(x)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())


@every_layer
def test_a_retained_graph_can_be_used_again(make):
    layer = make()
    x = torch.randn(3, 4, 5, requires_grad=True)
    y = layer(x).square().sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, x)
    if isinstance(layer, StreamingNorm):
        assert int(layer.grads.count) == 2


def test_evaluation_can_be_differentiated_twice():
    layer = StreamingNorm(4)
    layer(torch.randn(3, 4))
    x = torch.randn(3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(layer.eval()(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.isfinite(second).all()


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_path_runs_on_any_device(make, masked):
    layer = make(device="meta")
    for space in [(6, 5)] * 2:
        x = torch.randn(3, 4, *space, device="meta", requires_grad=True)
        mask = torch.ones(3, *space, dtype=torch.bool, device="meta") if masked else None
        y = layer(x, mask=mask)
        y.sum().backward()
        assert y.device.type == x.grad.device.type == layer.weight.grad.device.type == "meta"
        if isinstance(layer, StreamingNorm):
            layer.weights_updated()
    moved = make().to("meta")
    assert all(t.device.type == "meta" for t in moved.state_dict().values())
    alive = moved.to_empty(device="cpu")
    assert all(t.device.type == "cpu" for t in alive.state_dict().values())


class NoSynchronisation(TorchDispatchMode):
    """Fails on any operation whose result the host waits for."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.waits, f"{name} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_the_host_never_waits(make, masked):
    layer = make()
    mask = torch.rand(3, 5) > 0.2 if masked else None
    with NoSynchronisation():
        for _ in range(2):
            layer(torch.randn(3, 4, 5, requires_grad=True), mask=mask).sum().backward()
            if isinstance(layer, StreamingNorm):
                layer.weights_updated()
    with pytest.raises(AssertionError, match="host wait"), NoSynchronisation():
        torch.ones(1).item()


@every_layer
def test_without_gain_and_bias(make):
    layer = make(affine=False)
    assert list(layer.parameters()) == []
    assert layer.weight is layer.bias is None
    x = torch.randn(3, 4, 5, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None


@every_layer
@pytest.mark.parametrize("trained", ["input", "gain", "bias"])
def test_whatever_needs_a_gradient_gets_it(make, trained):
    layer = make()
    x = torch.randn(3, 4, 5, requires_grad=trained == "input")
    layer.weight.requires_grad_(trained == "gain")
    layer.bias.requires_grad_(trained == "bias")
    layer(x).square().sum().backward()
    got = [t.grad is not None for t in (x, layer.weight, layer.bias)]
    assert got == [trained == "input", trained == "gain", trained == "bias"]
    if isinstance(layer, StreamingNorm):
        assert int(layer.grads.count) == 1  # also when only gain or bias needs the backward pass


@every_layer
def test_repr_is_the_constructor(make):
    layer = make()
    again = eval(repr(layer), vars(streamnorm))
    assert repr(again) == repr(layer)


def test_repr_of_an_own_reference():
    layer = SampleNorm(4, ref=NormRef(False, "each", 3), eps=1e-3)
    assert repr(eval(repr(layer), vars(streamnorm))) == repr(layer)


def test_affine_keeps_the_type_of_its_input():
    affine = streamnorm.Affine(4)
    assert affine(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert "4, channel_dim=1" in repr(affine)


def test_settings_can_be_changed_like_those_of_torch():
    layer, slow = StreamingNorm(4), GeneralBatchNorm(4)
    layer.eps, slow.momentum = 10.0, 0.0
    assert layer(torch.randn(8, 4)).abs().max() < 2
    slow(torch.randn(8, 4) + 9)
    assert torch.equal(slow.mean, torch.zeros(4))


@pytest.mark.parametrize("name", ["StreamingNorm", "GeneralBatchNorm", "SampleNorm", "TimeSpecificNorm"])
def test_signatures(name):
    parameters = list(inspect.signature(getattr(streamnorm, name)).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["num_features"] + ["steps"] * (name == "TimeSpecificNorm")
    assert [p.name for p in parameters[-2:]] == ["device", "dtype"]
    forward = inspect.signature(getattr(streamnorm, name).forward)
    assert list(forward.parameters) == ["self", "x", "mask", "step"]


def test_defaults_are_the_designs():
    layer = StreamingNorm(4)
    assert (layer.ref, layer.p, layer.center) == (CODES["BA1"], 2.0, "running")
    assert (layer.alpha, layer.beta, layer.kappa) == ((0.7, 0.3), (0.7, 0.3, 0.0), (0.7, 0.3, 0.7, 0.3))
    assert (layer.warmup, layer.eps, layer.affine, layer.channel_dim) == (256, 1e-5, True, 1)
    assert StreamingNorm(4, alpha=(0.5, 0.4)).kappa == (0.5, 0.4, 0.5, 0.4)


def test_only_the_input_stays_alive_between_forward_and_backward():
    layer = StreamingNorm(16)
    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    for _ in range(2):
        saved = []

        def keep(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layer(x).sum().backward()
        assert {t.data_ptr() for t in saved if t.numel() == x.numel()} == {x.data_ptr()}
