"""Weight standardization: against loops from the paper, in place and back, never an old weight, folded and exported."""

import copy
import functools
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import oracle_standardize as oracle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import streamnorm
from streamnorm import StreamingNorm
from streamnorm.convert import standardize
from streamnorm.convert.standardize import Standardized

ROOT = Path(__file__).parent.parent
weight_standardize = functools.partial(streamnorm.weight_standardize, report=None)
remove = functools.partial(streamnorm.remove_weight_standardization, report=None)
fuse = functools.partial(streamnorm.fuse, report=None)

LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "1d": lambda: nn.Conv1d(3, 4, 3),
    "2d": lambda: nn.Conv2d(3, 4, (3, 2)),
    "3d": lambda: nn.Conv3d(2, 3, 2, bias=False),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed 1d": lambda: nn.ConvTranspose1d(3, 4, 2),
    "transposed 2d": lambda: nn.ConvTranspose2d(3, 5, (3, 2)),
    "transposed 3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "transposed grouped": lambda: nn.ConvTranspose2d(6, 4, 3, groups=2),
    "transposed depthwise": lambda: nn.ConvTranspose1d(4, 4, 3, groups=4),
}


def raw(layer):
    return layer.parametrizations.weight.original


def data(layer, samples=3):
    if isinstance(layer, nn.Linear):
        return torch.randn(samples, layer.in_features, dtype=layer.weight.dtype)
    return torch.randn(samples, layer.in_channels, *(5 for _ in layer.kernel_size), dtype=layer.weight.dtype)


def expected(layer):
    """What its weight has to be, computed anew."""
    each = layer.parametrizations.weight[0]
    fresh = Standardized(each.eps, each.groups, each.scale)
    return fresh(raw(layer).detach())


class Negative(nn.Module):
    """Another parametrization, on top of ours."""

    def forward(self, weight):
        return -weight

    right_inverse = forward


def network(norm=StreamingNorm):
    body = nn.Sequential(nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, groups=2), norm(4))
    return nn.Sequential(body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def trained(model, updates=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    return model


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True], ids=["one", "kept"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("name", LAYERS)
def test_against_the_loops_of_the_paper(name, eps, keep):
    """Forward and backward; also a filter whose weights are equal. A scale that is kept stays as the weights change."""
    layer = LAYERS[name]().double()
    transposed = isinstance(layer, standardize.TRANSPOSED)
    setting = {"eps": eps, "groups": getattr(layer, "groups", 1), "transposed": transposed}
    with torch.no_grad():
        layer.weight[0] = 0.5
    weight_standardize(layer, eps=eps, keep_scale=keep)
    w = raw(layer).detach().numpy()
    scale = oracle.scale(w, **setting) if keep else 1.0
    w += torch.randn_like(raw(layer)).numpy()
    assert abs(layer.weight.detach().numpy() - scale * oracle.standardized(w, **setting)).max() < 1e-10
    g = torch.randn_like(layer.weight)
    layer.weight.backward(g)
    theirs = scale * oracle.gradient(w, g.numpy(), **setting)
    assert abs(raw(layer).grad.numpy() - theirs).max() < 1e-10 * max(1, abs(theirs).max())


@pytest.mark.parametrize("name", LAYERS)
def test_the_weights_of_an_output_channel_are_those_that_it_depends_on(name):
    """Scaling one filter, found by the gradient of one output channel, changes nothing."""
    layer = LAYERS[name]().double()
    x = data(layer)
    channels = layer(x).movedim(1, 0)
    filters = [torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)[0] != 0 for y in channels]
    assert torch.equal(sum(each.long() for each in filters), torch.ones_like(layer.weight).long())
    weight_standardize(layer, eps=1e-14)
    before = layer(x)
    with torch.no_grad():
        raw(layer)[filters[-1]] *= 7
        raw(layer)[filters[0]] += 3
    assert torch.allclose(layer(x), before)
    for each in filters:
        weights = layer.weight[each].detach()
        assert abs(float(weights.mean())) < 1e-12
        assert abs(float(weights.var(correction=0)) - 1) < 1e-8


@pytest.mark.parametrize("name", ["2d", "transposed grouped"])
def test_second_derivatives(name):
    layer = weight_standardize(LAYERS[name]().double())
    each = layer.parametrizations.weight[0]
    assert torch.autograd.gradgradcheck(each, (raw(layer).detach().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_the_result_alone(dtype):
    layer = nn.Linear(300, 2, dtype=dtype)
    exact = oracle.standardized(layer.weight.detach().double().numpy(), 1e-5)
    weight_standardize(layer)
    assert layer.weight.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert abs(layer.weight.detach().double().numpy() - exact).max() < 2 * rounding * abs(exact).max()


@pytest.mark.parametrize("name", LAYERS)
def test_filters_of_equal_variance_keep_theirs(name):
    """Only their means go, whatever eps is."""
    layer = LAYERS[name]().double()
    with torch.no_grad():
        layer.weight.copy_(weight_standardize(copy.deepcopy(layer), eps=1e-14).weight / 50 + 1)
    before = layer.weight.detach() - 1
    weight_standardize(layer, eps=1e-2, keep_scale=True)
    assert torch.allclose(layer.weight, before)


# ---- in place, and back ---------------------------------------------------------------------------------------------


def test_the_parameters_stay_and_come_back():
    model = network()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())
    assert weight_standardize(model) is model
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    assert remove(model) is model
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert type(model[0][0]) is nn.Conv2d
    model = remove(weight_standardize(trained(weight_standardize(model))))
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in ("0.0.weight", "0.3.weight"))


def test_taken_off_a_copy_the_original_keeps_it():
    """Also where the bias is parametrized too; copies share a class with their original."""
    model = weight_standardize(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)))
    parametrize.register_parametrization(model[1], "bias", Negative())
    twins = [remove(copy.deepcopy(model)), fuse(model)]
    for layer in model:
        assert torch.equal(layer.weight, expected(layer))
    for i, layer in enumerate(model):
        assert torch.equal(twins[0][i].weight, raw(layer))
        assert torch.equal(twins[1][i].weight, layer.weight)
        assert all(isinstance(twin[i].weight, nn.Parameter) for twin in twins)
        assert all(torch.equal(twin[i].bias, layer.bias) for twin in twins)
    assert type(twins[0][0]) is nn.Linear


def test_torch_bakes():
    layer = weight_standardize(nn.Linear(5, 4))
    weight = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, weight)


def test_what_is_assigned_becomes_the_raw_weight():
    layer = weight_standardize(nn.Linear(5, 4))
    layer.weight = torch.ones(4, 5).tril()
    assert torch.equal(raw(layer), torch.ones(4, 5).tril())


def test_the_report():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3),
            "pointwise": nn.Conv2d(4, 4, 1, groups=4),
            "one": nn.Linear(1, 4),
            "normed": parametrizations.weight_norm(nn.Linear(3, 4)),
            "pruned": prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5),
            "own": type("Own", (nn.Linear,), {"forward": lambda self, x: x})(3, 4),
            "norm": nn.BatchNorm1d(4),
            "head": nn.Linear(4, 2),
        }
    )
    model["again"] = model["conv"]
    lines = []
    streamnorm.weight_standardize(model, skip="head", report=lines.append)
    assert lines == [
        "conv, again: Conv2d standardized over 27 weights per filter",
        "pointwise: Conv2d left alone: it has 1 weight(s) per filter, of which nothing would be left",
        "one: Linear left alone: it has 1 weight(s) per filter, of which nothing would be left",
        "normed: Linear left alone: its weight is computed from other parameters (parametrized, pruned)",
        "pruned: Linear left alone: its weight is computed from other parameters (parametrized, pruned)",
        "own: Own left alone: its class computes something else than torch's, by a forward of its own",
        "head: Linear left alone: skipped",
    ]
    lines.clear()
    streamnorm.weight_standardize(model["conv"], report=lines.append)
    assert lines == ["(model): Conv2d left alone: it is standardized already"]
    lines.clear()
    streamnorm.weight_standardize(nn.utils.skip_init(nn.Linear, 2, 3, device="meta"), keep_scale=True, report=None)
    zero = nn.init.zeros_(nn.Conv2d(2, 3, 3).weight)
    last = nn.Conv2d(2, 3, 3)
    last.weight = zero
    streamnorm.weight_standardize(last, keep_scale=True, report=lines.append)
    assert lines == [
        "(model): Conv2d left alone: the weights of each filter are equal, so that there is no scale to keep"
    ]
    lines.clear()
    streamnorm.remove_weight_standardization(model, report=lines.append)
    streamnorm.remove_weight_standardization(model, report=lines.append)
    streamnorm.weight_standardize(nn.ReLU(), report=lines.append)
    assert lines == [
        "conv, again: Conv2d has its raw weight again",
        "ModuleDict has no standardized weight",
        "ReLU has no weight to standardize",
    ]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (None, []),
        ((), []),
        ("4", ["4"]),
        ("0", ["0.0", "0.3"]),
        (["0.*", "4"], ["0.0", "0.3", "4"]),
        (lambda model: model[4], ["4"]),
        (lambda model: [model[0], "4"], ["0.0", "0.3", "4"]),
        (lambda model: lambda name, module: isinstance(module, nn.Linear), ["4"]),
    ],
)
def test_skip(skip, left):
    model = network()
    weight_standardize(model, skip=skip(model) if callable(skip) else skip)
    plain = [name for name in ("0.0", "0.3", "4") if not parametrize.is_parametrized(model.get_submodule(name))]
    assert plain == left


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"eps": 0}, ValueError, "eps=0: must be a finite number above 0"),
        ({"eps": -1e-5}, ValueError, "eps=-1e-05"),
        ({"eps": float("nan")}, ValueError, "eps=nan"),
        ({"eps": "small"}, ValueError, "eps='small'"),
        ({"eps": True}, ValueError, "eps=True"),
        ({"keep_scale": 1.0}, TypeError, "keep_scale=1.0: must be True or False"),
        ({"skip": "head"}, ValueError, "skip='head' names no module of the model: see"),
        ({"skip": 4}, TypeError, "skip=4: pass modules, names or patterns"),
        ({"skip": [4]}, TypeError, "names or patterns of modules"),
        ({"skip": nn.Linear(2, 2)}, ValueError, "skip has a Linear that is no module of the model"),
    ],
)
def test_nonsense_is_refused_and_the_model_is_as_it_was(settings, kind, message):
    model = network()
    with pytest.raises(kind, match=message):
        weight_standardize(model, **settings)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


def test_models_that_are_refused():
    with pytest.raises(TypeError, match=r"weight_standardize: model is list: pass an nn\.Module"):
        weight_standardize([])
    with pytest.raises(ValueError, match=r"is a DataParallel: pass model\.module"):
        weight_standardize(nn.DataParallel(nn.Linear(2, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old versions of torch, about lazy modules
        lazy = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="1 is a LazyLinear without a size yet: run one batch"):
        weight_standardize(lazy)
    assert not parametrize.is_parametrized(lazy[0])
    both = parametrize.register_parametrization(weight_standardize(nn.Linear(3, 4)), "weight", Negative())
    with pytest.raises(ValueError, match=r"the weight of \(model\) has further parametrizations"):
        remove(both)


@pytest.mark.parametrize("keep", [False, True])
def test_weights_that_layers_share(keep):
    """Each layer standardizes over its own filters; they train one raw weight, and what else reads it reads that."""
    encoder, decoder, same = nn.Conv1d(2, 3, 4), nn.ConvTranspose1d(3, 2, 4), nn.Conv1d(2, 3, 4)
    decoder.weight = same.weight = encoder.weight
    reader = nn.ParameterList([encoder.weight])
    model = weight_standardize(nn.ModuleList([encoder, decoder, same, reader]), keep_scale=keep)
    assert raw(encoder) is raw(decoder) is raw(same) is reader[0]
    assert torch.equal(encoder.weight, same.weight)
    assert torch.allclose(decoder.weight.mean((0, 2)), torch.zeros(2), atol=1e-6)
    assert not torch.equal(encoder.weight, decoder.weight)
    fused = fuse(model)
    assert fused[0].weight is fused[2].weight
    for i in range(3):
        assert torch.equal(fused[i].weight, model[i].weight)
    assert torch.equal(fused[3][0], reader[0])


# ---- of the raw weight as it is now ----------------------------------------------------------------------------------


def averaged(layer):
    for parameter in layer.parameters():
        parameter.data.mul_(0.9).add_(torch.randn_like(parameter))


def swapped(layer):
    raw(layer).data = torch.randn_like(raw(layer))
    raw(layer).data = torch.randn_like(raw(layer))


CHANGES = {
    "in place": lambda layer: raw(layer).add_(torch.randn_like(raw(layer))),
    "initialized": lambda layer: nn.init.normal_(raw(layer)),
    "one element": lambda layer: raw(layer)[1, 2].fill_(9),
    "assigned": lambda layer: setattr(layer, "weight", torch.randn(layer.weight.shape, dtype=layer.weight.dtype)),
    "loaded": lambda layer: layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()}),
    "loaded, assigned": lambda layer: layer.load_state_dict(
        {k: torch.randn_like(v) for k, v in layer.state_dict().items()}, assign=True
    ),
    "other memory": swapped,
    "in place, by its data": averaged,
    "a filter, by its data": lambda layer: raw(layer).data[3].normal_(),
    "by NumPy": lambda layer: raw(layer).detach().numpy().__imul__(-1),
    "another type": lambda layer: layer.double(),
    "half precision": lambda layer: layer.bfloat16(),
    "the result": lambda layer: layer.weight.fill_(3),
    "another parameter": lambda layer: setattr(
        layer.parametrizations.weight, "original", nn.Parameter(torch.randn_like(raw(layer)))
    ),
    "a vector": lambda layer: nn.utils.vector_to_parameters(
        torch.randn(sum(p.numel() for p in layer.parameters())), layer.parameters()
    ),
    "an optimizer": lambda layer: [
        setattr(raw(layer), "grad", torch.randn_like(raw(layer))),
        torch.optim.Adam(layer.parameters(), lr=1).step(),
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [(4, 5), (48, 6, 3, 3)], ids=["small", "large"])
@torch.no_grad()
def test_a_weight_that_changed_is_never_served_as_it_was(change, size):
    layer = nn.Linear(size[1], size[0]) if len(size) == 2 else nn.Conv2d(size[1], size[0], size[2:])
    weight_standardize(layer).eval()
    for _ in range(3):
        layer(data(layer))
        CHANGES[change](layer)
        assert torch.equal(layer.weight, expected(layer))
        assert layer.weight.dtype == raw(layer).dtype
    layer(data(layer))
    CHANGES[change](layer)
    layer.train()
    layer.eval()
    assert torch.equal(layer.weight, expected(layer))


@torch.no_grad()
def test_a_layer_that_moves_gets_its_weight_anew():
    layer = weight_standardize(nn.Conv2d(3, 4, 3)).eval()
    before = layer.weight
    assert layer.to(memory_format=torch.channels_last).weight is not before
    assert torch.equal(layer.weight, before)
    assert layer.to("meta").weight.is_meta


@torch.no_grad()
def test_a_call_with_other_weights_gets_those():
    layer = weight_standardize(nn.Linear(3, 4)).eval()
    x, other = torch.randn(2, 3), torch.randn(4, 3)
    before = layer(x)
    y = torch.func.functional_call(layer, {"parametrizations.weight.original": other}, (x,))
    assert torch.allclose(y, x @ Standardized()(other).T + layer.bias)
    assert torch.equal(layer(x), before)
    many = torch.randn(5, 4, 3)
    ys = torch.func.vmap(
        lambda w: torch.func.functional_call(layer, {"parametrizations.weight.original": w}, (x,)), randomness="error"
    )(many)
    for w, y in zip(many, ys, strict=True):
        assert torch.allclose(y, x @ Standardized()(w).T + layer.bias, atol=1e-5)


def test_copies_have_weights_of_their_own():
    layer = weight_standardize(nn.Linear(3, 4)).eval()
    with torch.no_grad():
        layer(torch.ones(1, 3))
        twin = copy.deepcopy(layer)
        raw(twin).normal_()
        assert torch.equal(twin.weight, expected(twin))
        assert torch.equal(layer.weight, expected(layer))
    assert set(layer.state_dict()) == {"bias", "parametrizations.weight.original"}
    again = pickle.loads(pickle.dumps(layer.parametrizations.weight[0]))
    assert (again.eps, again.groups) == (1e-5, None)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):  # torch's rule for parametrizations
        pickle.dumps(layer)
    pickle.dumps(remove(layer))


@pytest.mark.parametrize("keep", [False, True])
def test_saved_and_resumed_is_never_stopped(keep):
    """Also where the other model has begun with weights of another scale."""
    seeds = iter(range(2))

    def made():
        torch.manual_seed(next(seeds))
        model = weight_standardize(network(), skip="4", keep_scale=keep)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer, updates):
        for i in updates:
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 3, 6, 6)).square().mean().backward()
            optimizer.step()

    (model, optimizer), (other, second) = made(), made()
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    state, state_of_optimizer = torch.load(file, weights_only=True)
    other.load_state_dict(state)
    second.load_state_dict(state_of_optimizer)
    for each in ((model, optimizer), (other, second)):
        train(*each, range(2, 4))
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_a_scale_that_is_kept_is_saved():
    layer = weight_standardize(nn.Conv2d(3, 4, 3), keep_scale=True)
    assert set(layer.state_dict()) - {"bias", "parametrizations.weight.original"} == {"parametrizations.weight.0.scale"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"parametrizations.weight.0.scale\""):
        layer.load_state_dict(weight_standardize(nn.Conv2d(3, 4, 3)).state_dict())
    assert layer.bfloat16().weight.dtype == torch.bfloat16
    assert "scale" not in repr(weight_standardize(nn.Linear(3, 4)))
    assert f"scale={layer.parametrizations.weight[0].scale:g}" in repr(layer)
    assert "scale" not in repr(layer.to("meta"))


def test_averaged_models():
    model = trained(weight_standardize(network(), skip="4"))
    average = AveragedModel(model)
    trained(model)
    average.update_parameters(model)
    layer = average.module[0][0]
    with torch.no_grad():
        assert torch.equal(average.eval().module[0][0].weight, expected(layer))
        before = layer.weight
        with torch.enable_grad():
            trained(model)
        average.update_parameters(model)
        assert not torch.equal(layer.weight, before)
        assert torch.equal(layer.weight, expected(layer))


# ---- beside the rest of the library ---------------------------------------------------------------------------------


def norms(model):
    return [module for module in model.modules() if isinstance(module, StreamingNorm)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_fuse_leaves_plain_weights(inplace, keep):
    model, x = trained(weight_standardize(network(), keep_scale=keep)).eval(), torch.randn(2, 3, 6, 6)
    before, lines = model(x), []
    fused = streamnorm.fuse(model, example=x, inplace=inplace, report=lines.append)
    assert (fused is model) == inplace
    assert not any(parametrize.is_parametrized(module) for module in fused.modules())
    assert not norms(fused)
    assert [type(fused[0][i]) for i in (0, 1, 3, 4)] == [nn.Conv2d, nn.Identity, nn.ConvTranspose2d, nn.Identity]
    assert set(fused.state_dict()) == {f"{i}.{name}" for i in ("0.0", "0.3", "4") for name in ("weight", "bias")}
    assert torch.allclose(fused(x), before, atol=1e-5)
    assert lines[0] == "0.0: weight standardization folded into the weights"
    assert "0.1: StreamingNorm(6) folded into 0.0" in lines
    assert parametrize.is_parametrized(model[0][0]) != inplace


def test_fuse_leaves_other_parametrizations_alone():
    model = trained(network())
    parametrize.register_parametrization(weight_standardize(model[0][0]), "weight", Negative())
    fused, x = fuse(model), torch.randn(2, 3, 6, 6)
    assert parametrize.is_parametrized(fused[0][0])
    assert torch.allclose(fused.eval()(x), model.eval()(x), atol=1e-5)


def test_to_batchnorm_keeps_it():
    model, x = trained(weight_standardize(network(), skip="4")).eval(), torch.randn(2, 3, 6, 6)
    deployed = streamnorm.to_batchnorm(model, report=None)
    assert not norms(deployed)
    assert parametrize.is_parametrized(deployed[0][0])
    assert torch.allclose(deployed(x), model(x), atol=1e-5)
    back = streamnorm.convert(deployed, report=None)
    assert parametrize.is_parametrized(back[0][0])
    assert torch.allclose(back(x), model(x), atol=1e-5)


@pytest.mark.parametrize("encoder", [False, True])
def test_layers_whose_weight_others_read(encoder):
    """Torch's attention and encoder hand the weights of their linear layers to functions, and have a fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) if encoder else None
    model = layer or nn.MultiheadAttention(8, 2, batch_first=True)
    plain, x = copy.deepcopy(model), torch.randn(2, 5, 8)
    weight_standardize(model)
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            plain.get_submodule(name).weight.data = module.weight.detach().clone()
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            one, two = (each.eval()(*([x] if encoder else [x, x, x])) for each in (model, plain))
        assert torch.allclose(*((one, two) if encoder else (one[0], two[0])), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
def test_compiled():
    """The same training, evaluation and evaluation after changes; standardized after torch.compile too."""
    torch.compiler.reset()
    model = weight_standardize(weight_standardize(network(), skip=["0.0", "4"], keep_scale=True), skip="4")
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for each in (model, compiled):
        torch.manual_seed(1)
        trained(each)
    x = torch.randn(2, 3, 6, 6)
    model.eval(), compiled.eval()
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
            for each in (model, twin):
                torch.manual_seed(2)
                averaged(each)
    weight_standardize(compiled), weight_standardize(model)
    assert parametrize.is_parametrized(twin[4])
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the exporters, about themselves
def test_exported():
    """A standardized model as it is, and with plain weights once it is fused."""
    model, x = trained(weight_standardize(network(), skip="4")).eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model(x)  # which keeps the weights
        program = torch.export.export(model, (x,), strict=False)
        assert torch.allclose(program.module()(x), model(x), atol=1e-5)
        assert torch.allclose(torch.jit.trace(model, x)(x), model(x), atol=1e-5)
        plain = torch.export.export(fuse(model), (x,), strict=False)
        assert not [name for name in plain.state_dict if "parametrizations" in name]
        assert not [node for node in plain.graph.nodes if "layer_norm" in str(node.target)]
        assert torch.allclose(plain.module()(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = trained(weight_standardize(network(), skip="4")).eval(), torch.randn(2, 3, 6, 6)
    for each, name in ((model, "standardized.onnx"), (fuse(model), "fused.onnx")):
        torch.onnx.export(each, (x,), str(tmp_path / name), dynamo=True)
        session = runtime.InferenceSession(str(tmp_path / name))
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(y), model(x), atol=1e-5)


def test_the_benchmark():
    """The rows of the page are those that it prints."""
    command = [sys.executable, "benchmarks/standardize.py", "--rounds", "2", "--batches", "1", "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    page = (ROOT / "docs/guide/weight_standardization.md").read_text(encoding="utf-8")
    rows = done.stdout.splitlines()
    assert len(rows) == 8
    for row in rows:
        assert "|".join(row.split("|")[:3]) in page
