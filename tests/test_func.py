"""torch.func: every norm where it changes no statistics; refused, and nothing touched, where it would."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import streamnorm
from streamnorm import (
    GRU,
    LSTM,
    RNN,
    ConvGRU,
    GeneralBatchNorm,
    GRUCell,
    SampleNorm,
    StreamingNorm,
    TimeSpecificNorm,
    paused,
)

KEEPING = {  # norms that keep statistics
    "streaming": lambda **kw: StreamingNorm(3, **kw),
    "streaming-BA6": lambda **kw: StreamingNorm(3, ref="BA6", p=1.0, **kw),
    "streaming-SP3": lambda **kw: StreamingNorm(3, ref="SP3", p=3.0, **kw),
    "batch": lambda **kw: GeneralBatchNorm(3, **kw),
    "batch-B": lambda **kw: GeneralBatchNorm(3, center="running", p=1.5, **kw),
    "time-specific": lambda **kw: TimeSpecificNorm(3, steps=2, **kw),
}
SAMPLE = {
    f"sample-{code}-{p:g}-{center}": lambda code=code, p=p, center=center, **kw: SampleNorm(
        3, ref=code, p=p, center=center, **kw
    )
    for code in ("SP1", "SP2", "SP3", "SP4", "SP5")
    for p in (1.0, 2.0, 3.0)
    for center in ("mean", "zero")
}
# jvp loads torch's own decompositions, which warn of their own age.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")


def trained(make):
    """A layer in float64 that has seen data, with gain and bias of its own."""
    layer = make(dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        for _ in range(3):
            layer(torch.randn(6, 3, 4, 5, dtype=torch.float64) * 2 + 1)
    return layer


def parameters(layer):
    return {name: torch.randn_like(value) for name, value in layer.named_parameters()}


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def snapshot(model):
    return copy.deepcopy(model.state_dict())


def unchanged(model, before):
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("make", (KEEPING | SAMPLE).values(), ids=KEEPING | SAMPLE)
def test_in_evaluation_every_transform_gives_what_a_loop_gives(make):
    layer = trained(make).eval()
    x = torch.randn(4, 3, 4, 5, dtype=torch.float64)
    other, before = parameters(layer), snapshot(layer)
    target = torch.randn_like(x)

    def loss(p, x, target):
        return (functional_call(layer, p, (x[None],))[0] * target).square().sum()

    wanted = []
    for sample, t in zip(x, target, strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in other.items()}
        leaves["x"] = sample.clone().requires_grad_()
        # An ordinary call: the layer holds the other parameters.
        twin = copy.deepcopy(layer)
        twin.weight, twin.bias = nn.Parameter(leaves["weight"]), nn.Parameter(leaves["bias"])
        (twin(leaves["x"][None])[0] * t).square().sum().backward()
        wanted.append({"weight": twin.weight.grad, "bias": twin.bias.grad, "x": leaves["x"].grad})
    per_sample, for_x = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0, 0))(other, x, target)
    for i, each in enumerate(wanted):
        same(per_sample["weight"][i], each["weight"])
        same(per_sample["bias"][i], each["bias"])
        same(for_x[i], each["x"])
    unchanged(layer, before)


@pytest.mark.parametrize("make", [KEEPING["streaming"], KEEPING["batch"], SAMPLE["sample-SP1-2-mean"]])
def test_jacobians_tangents_and_second_derivatives(make):
    layer = trained(make).eval()
    x, v = torch.randn(2, 2, 3, 2, 2, dtype=torch.float64)
    reverse = jacrev(layer)(x)
    same(jacfwd(layer)(x), reverse)
    output, tangent = jvp(layer, (x,), (v,))
    same(output, layer(x))
    same(tangent, torch.tensordot(reverse, v, dims=4))
    with forward_ad.dual_level():
        same(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent, tangent)
    second = hessian(lambda x: layer(x).pow(3).sum())(x)
    same(second, jacfwd(lambda x: grad(lambda x: layer(x).pow(3).sum())(x))(x))
    assert second.abs().max() > 0


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("make", [*KEEPING.values(), SAMPLE["sample-SP2-2-mean"]])
def test_an_ensemble_by_vmap(make, recording):
    """Stacked parameters, one input: also without grad, when layers would like to work in place."""
    layer = trained(make).eval()
    members = [parameters(layer) for _ in range(3)]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    with torch.set_grad_enabled(recording):
        together = vmap(lambda p: functional_call(layer, p, (x,)))(stacked)
        for member, y in zip(members, together, strict=True):
            same(y, functional_call(layer, member, (x,)))


def test_stacked_modules():
    """torch's recipe for ensembles, whose members keep their own statistics only where those are buffers."""
    models = [trained(KEEPING["batch"]).eval() for _ in range(3)]
    stacked = stack_module_state(models)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    together = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(*stacked)
    for model, y in zip(models, together, strict=True):
        same(y, model(x))


RECURRENT = {
    "rnn": lambda norm: RNN(3, 4, norm=norm, batch_first=True),
    "gru": lambda norm: GRU(3, 4, num_layers=2, norm=norm, batch_first=True),
    "lstm": lambda norm: LSTM(3, 4, norm=norm, batch_first=True, cell_norm=True, bidirectional=True),
    "conv-gru": lambda norm: ConvGRU(3, 4, norm=norm),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", [StreamingNorm, SampleNorm])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name, norm, training):
    """Per-sample gradients through time; in training too where the norm keeps nothing, or is paused."""
    layer = RECURRENT[name](norm).double()
    x = torch.randn(3, 5, 3, *([6, 6] if name == "conv-gru" else []), dtype=torch.float64)
    layer(x)
    layer.train(training)
    before = snapshot(layer)
    held = {key: value.detach() for key, value in layer.named_parameters()}
    narrow = copy.deepcopy(layer).float()
    with paused(layer), paused(narrow):
        together = vmap(grad(lambda p, x: functional_call(layer, p, (x[None],))[0].square().sum()), (None, 0))(held, x)
        for i, sample in enumerate(x):
            layer.zero_grad()
            layer(sample[None])[0].square().sum().backward()
            for key, parameter in layer.named_parameters():
                same(together[key][i], parameter.grad)
        with torch.no_grad():  # where the kernels would serve an ordinary call
            y = vmap(lambda x: narrow(x[None])[0][0])(x.float())
            torch.testing.assert_close(y, layer(x)[0].float(), rtol=1e-4, atol=1e-5)
    unchanged(layer, before)


def test_sample_norm_works_in_training():
    """It keeps nothing: with torch.func it is the same function in training."""
    model = nn.Sequential(nn.Linear(5, 6), SampleNorm(6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    held = {name: value.detach() for name, value in model.named_parameters()}

    def loss(p, x, y):
        return (functional_call(model, p, (x,)) - y).square().mean()

    whole = grad(loss)(held, x, y)
    each = vmap(grad(lambda p, x, y: loss(p, x[None], y[None])), (None, 0, 0))(held, x, y)
    (model(x) - y).square().mean().backward()
    for name, parameter in model.named_parameters():
        same(whole[name], parameter.grad)
        same(each[name].mean(0), parameter.grad)


@pytest.mark.parametrize("make", [SampleNorm, lambda c, **kw: SampleNorm(c, ref="SP3", p=3.0, **kw)])
def test_masks_in_transforms(make):
    layer = make(3, dtype=torch.float64)
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([8, 5, 3, 2])[:, None]
    x = torch.where(mask[:, None], x, torch.nan).requires_grad_()
    (wanted,) = torch.autograd.grad(layer(x, mask=mask).square().sum() + layer(x, mask=mask).sum(), x)
    got = grad(lambda x: layer(x, mask=mask).square().sum() + layer(x, mask=mask).sum())(x.detach())
    same(got, wanted)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("make", [KEEPING["batch"], KEEPING["batch-B"]])
def test_a_paused_batch_norm_in_training(make):
    """It normalizes by the batch and keeps nothing: torch.func differentiates that."""
    layer = trained(make)
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    before = snapshot(layer)
    with paused(layer):
        (wanted,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
        same(grad(lambda x: layer(x).pow(3).sum())(x.detach()), wanted)
    unchanged(layer, before)


REFUSED = {
    "grad": lambda layer, x: grad(lambda x: layer(x).sum())(x),
    "grad of parameters": lambda layer, x: grad(lambda p: functional_call(layer, p, (x,)).sum())(parameters(layer)),
    "vmap": lambda layer, x: vmap(layer)(x[None]),
    "vmap without grad": torch.no_grad()(lambda layer, x: vmap(layer)(x[None])),
    "per sample": lambda layer, x: vmap(grad(lambda x: layer(x[None]).sum()))(x),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,)),
    "jacrev": lambda layer, x: jacrev(layer)(x),
    "elsewhere": lambda layer, x: grad(lambda w: (layer(x) * w).sum())(torch.ones_like(x)),
    "masked": lambda layer, x: grad(lambda x: layer(x, mask=torch.ones(len(x), 1, 1) > 0).sum())(x),
}


@pytest.mark.parametrize("how", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # kernels, plain path
def test_in_training_they_are_refused_before_anything_changes(make, how, dtype):
    layer = trained(make).to(dtype)
    x = torch.randn(6, 3, 4, 5, dtype=dtype)
    layer(x), layer(x)  # so that a fast path has something to repeat
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match=r"training mode.*model\.eval\(\).*paused.*loss\.backward"):
        how(layer, x)
    unchanged(layer, before)
    layer.eval()
    how(layer, x)
    if isinstance(layer, StreamingNorm):  # batch norms could not take single samples
        with paused(layer.train()):
            how(layer, x)
    layer.train()
    unchanged(layer, before)
    layer(x).sum().backward()  # and it trains on


def test_forward_mode_is_refused_in_training():
    layer = StreamingNorm(3)
    x = torch.randn(6, 3)
    layer(x), layer(x)
    before = snapshot(layer)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        layer(forward_ad.make_dual(x, x))
    unchanged(layer, before)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_refuse_before_the_first_timestep(name):
    layer = RECURRENT[name](StreamingNorm)
    x = torch.randn(3, 5, 3, *([6, 6] if name == "conv-gru" else []))
    layer(x)
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match="StreamingNorm is in training mode"):
        grad(lambda x: layer(x)[0].sum())(x)
    unchanged(layer, before)
    cell = GRUCell(3, 4)
    with pytest.raises(RuntimeError, match="StreamingNorm is in training mode"):
        vmap(lambda x: cell(x[None]))(torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
@pytest.mark.parametrize("transform", [grad, vmap, jacrev], ids=lambda f: f.__name__)
def test_inside_torch_compile(transform):
    """The compiler carries transforms out by itself; the rule is the same."""
    layer = StreamingNorm(3)
    x = torch.randn(6, 3)
    layer(x)
    before = snapshot(layer)

    def call(x):
        return transform(lambda x: layer(x.reshape(-1, 3)).square().sum())(x)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"call model\.eval\(\) first"):
        compiled(x)
    unchanged(layer, before)
    layer.eval()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))


def test_functional_call_in_training_is_an_ordinary_call():
    """With ordinary autograd: it pushes into the module, and its update is heard through `attach`."""
    model = nn.Sequential(nn.Linear(4, 6), StreamingNorm(6), nn.ReLU(), nn.Linear(6, 2))
    twin = copy.deepcopy(model)
    held = {name: value.detach().clone().requires_grad_() for name, value in twin.named_parameters()}
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = torch.optim.SGD(held.values(), lr=0.1)
    streamnorm.attach(foreign, twin)
    start = {name: value.detach().clone() for name, value in twin.named_parameters()}
    for _ in range(5):
        x = torch.randn(8, 4)
        for optimizer, y in ((own, model(x)), (foreign, functional_call(twin, held, (x,)))):
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
    for name, value in model.named_parameters():
        assert torch.equal(held[name], value), name
    for name, value in twin.named_parameters():
        assert torch.equal(value, start[name])  # the module's own are not touched
        twin.get_parameter(name).data.copy_(held[name].detach())
    unchanged(twin, snapshot(model))
