"""`convert` and norms that are not torch's: what is known by name, rules of users, and what is said of the rest.

The classes here are written after what the libraries document, and stand in modules with the libraries' names.
"""

import copy
import functools
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from test_convert import shaken, step, table, trained
from torch import nn

import streamnorm
from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm, convert
from streamnorm.convert import rules as registry
from streamnorm.convert.known import NormAct
from streamnorm.nn.base import Norm

quiet = functools.partial(convert, report=None)


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def of(path):
    """Make a class one of the module `path`, as if the library were installed."""

    def moved(cls):
        home = sys.modules.setdefault(path, types.ModuleType(path))
        cls.__module__, cls.__qualname__ = path, cls.__name__
        setattr(home, cls.__name__, cls)
        return cls

    return moved


# Norms of other libraries


@of("timm.layers.norm_act")
class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, size, act=nn.ReLU, drop=nn.Identity, **options):
        super().__init__(size, **options)
        self.drop, self.act = drop(), act()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


@of("timm.layers.norm_act")
class GroupNormAct(nn.GroupNorm):
    def __init__(self, size, groups=2):
        super().__init__(groups, size)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


@of("timm.layers.norm")
class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1)


@of("timm.layers.norm")
class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@of("transformers.models.convnext.modeling_convnext")
class ConvNextLayerNorm(nn.LayerNorm):
    def __init__(self, size, *, eps=1e-6, data_format="channels_last"):
        super().__init__(size, eps=eps)
        self.data_format = data_format

    def forward(self, features):
        first = self.data_format == "channels_first"
        y = super().forward(features.movedim(1, -1) if first else features)
        return y.movedim(-1, 1) if first else y


@of("torchvision.ops.misc")
class FrozenBatchNorm2d(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((size,), value))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


@of("transformers.models.llama.modeling_llama")
class LlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@of("transformers.models.gemma.modeling_gemma")
class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return (1 + self.weight) * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@of("torch_geometric.nn.norm.graph_norm")
class GraphNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.mean_scale = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x - self.mean_scale * x.mean(0))


def images(n=4, size=6):
    return torch.randn(n, size, 5, 5) * 2 + 1


def network(make, **options):
    return nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), shaken(make(6, **options)), nn.Conv2d(6, 4, 1))


# Batch norms with an activation


@pytest.mark.parametrize("act", [nn.ReLU, functools.partial(nn.ReLU, inplace=True), nn.PReLU, nn.Identity, nn.SiLU])
@pytest.mark.parametrize("norm", [StreamingNorm, GeneralBatchNorm])
def test_a_batch_norm_with_an_activation_evaluates_as_before(act, norm):
    model, x = network(BatchNormAct2d, act=act, eps=1e-3), images()
    optimizer = trained(model, x)
    before, parameters = model.eval()(x), list(model.parameters())
    said = []
    convert(model, norm, report=said.append)
    assert torch.allclose(model(x), before, atol=1e-6)
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    assert (type(model[1]), type(model[1].norm), model[1].norm.eps) == (NormAct, norm, 1e-3)
    after = {nn.Identity: ""}.get(act, f", {type(model[1].act).__name__}")
    assert table(said)["1"] == f"BatchNormAct2d(6) -> {norm.__name__}(6){after}"
    model.train()
    for n in (1, 2, 1):
        step(model, optimizer, images(n))
    if norm is StreamingNorm:
        assert int(model[1].norm.stats.count) == 1  # updates are heard of
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_dropout_comes_before_the_activation_and_follows_the_mode():
    model = quiet(network(BatchNormAct2d, drop=functools.partial(nn.Dropout, 1.0), act=nn.Sigmoid))
    assert torch.equal(model[1](images()), torch.full((4, 6, 5, 5), 0.5))  # the sigmoid of what was dropped
    model.eval()
    assert not torch.equal(model[1](images()), torch.full((4, 6, 5, 5), 0.5))


def test_checkpoints_of_the_class_before_and_of_ours_load():
    """Keys are those of the old class: its checkpoints go on loading, and what is deployed loads into it."""
    old, x = network(BatchNormAct2d, act=nn.PReLU), images()
    model = quiet(copy.deepcopy(old))
    assert {"1.weight", "1.bias", "1.act.weight", "1.mean"} <= set(model.state_dict())
    assert not any("norm" in key for key in model.state_dict())
    trained(model, x)
    twin = quiet(copy.deepcopy(old))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True))
    back = network(BatchNormAct2d, act=nn.PReLU)
    back.load_state_dict(streamnorm.to_batchnorm(model, report=None).state_dict())
    assert torch.allclose(back.eval()(x), model(x), atol=1e-5)
    model.load_state_dict(old.state_dict())
    assert torch.allclose(model(x), old.eval()(x), atol=1e-6)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "1.norm.other"'):
        model.load_state_dict(model.state_dict() | {"1.other": torch.zeros(1)})


def test_it_can_be_copied_pickled_and_fused():
    model, x = quiet(network(BatchNormAct2d)).eval(), images()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
    fused = streamnorm.fuse(model, example=x, report=None)
    assert isinstance(fused[1].norm, nn.Identity)
    assert torch.allclose(fused(x), model(x), atol=1e-5)


def test_hooks_and_mode_go_to_what_stands_there():
    model, calls = network(BatchNormAct2d), []
    model[1].eval()
    model[1].register_forward_hook(lambda module, args, y: calls.append((module, bool((y < 0).any()))))
    quiet(model)
    model(images())
    assert calls == [(model[1], False)]  # after the activation
    assert not model[1].norm.training


# Layer norms


@pytest.mark.parametrize(
    ("make", "channel_dim"),
    [
        (LayerNorm, -1),
        (LayerNorm2d, 1),
        (ConvNextLayerNorm, -1),
        (functools.partial(ConvNextLayerNorm, data_format="channels_first"), 1),
        (GroupNormAct, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_and_group_norms_keep_layout_parameters_and_eps(make, channel_dim, dtype):
    old = shaken(make(6)).to(dtype)
    model = nn.Sequential(old)
    said = []
    convert(model, report=said.append)
    new = model[0].norm if isinstance(model[0], NormAct) else model[0]
    assert (type(new), new.channel_dim, new.eps, new.weight.dtype) == (StreamingNorm, channel_dim, old.eps, dtype)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert "starts afresh" in table(said)["0"]
    for n in (1, 2):
        x = images(n).to(dtype)
        assert model(x if channel_dim == 1 else x.movedim(1, -1)).isfinite().all()


@pytest.mark.parametrize("make", [LayerNorm2d, functools.partial(ConvNextLayerNorm, data_format="channels_first")])
def test_a_layer_norm_at_each_location_is_sp5(make):
    """The same numbers, so channels are where the old norm had them."""
    old, x = shaken(make(6)), images()
    assert torch.allclose(quiet(old, SampleNorm, ref="SP5")(x), old(x), atol=1e-5)


def test_channels_first_layer_norms_know_their_dimensions():
    model = quiet(network(LayerNorm2d))
    assert isinstance(streamnorm.to_batchnorm(model, report=None)[1], nn.BatchNorm2d)


# Classes that are not known, and compute what torch's do


class Fp32LayerNorm(nn.LayerNorm):
    """As in many libraries."""

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Sequence1dLayerNorm(nn.LayerNorm):
    """As SqueezeBERT's: (N, C, L) alone."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class PlainLayerNorm(nn.Module):
    """As Cohere's and DeBERTa's: no kin of torch's, no bias."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-3

    def forward(self, hidden_states):
        centred = hidden_states - hidden_states.mean(-1, keepdim=True)
        return self.weight * centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.variance_epsilon)


class DetLayerNorm(nn.Module):
    """As ViTDet's: channels first, written out."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), 1e-6

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * (x - u) / torch.sqrt(s + self.eps) + self.bias[:, None, None]


class BareLayerNorm(nn.Module):
    """As OLMo's: no parameters at all."""

    def __init__(self, size):
        super().__init__()
        self.normalized_shape, self.eps = (size,), 1e-5

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps)


class GroupNorm32(nn.GroupNorm):
    def __init__(self, size):
        super().__init__(2, size)

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Fp32BatchNorm2d(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("make", "channel_dim", "shape", "sample"),
    [
        (Fp32LayerNorm, -1, (2, 5, 6), "SP5"),
        (functools.partial(Fp32LayerNorm, elementwise_affine=False), -1, (2, 5, 6), "SP5"),
        (functools.partial(Fp32LayerNorm, bias=False), -1, (2, 6), "SP5"),
        (Sequence1dLayerNorm, 1, (2, 6, 5), "SP5"),
        (PlainLayerNorm, -1, (2, 5, 6), "SP5"),
        (DetLayerNorm, 1, (2, 6, 3, 4), "SP5"),
        (BareLayerNorm, -1, (2, 5, 6), "SP5"),
        (GroupNorm32, 1, (2, 6, 4), None),
        (Fp32BatchNorm2d, 1, (4, 6, 3, 4), None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_computes_what_torch_does_is_tried_out(make, channel_dim, shape, sample, dtype):
    old = shaken(make(6)).to(dtype)
    before, parameters, generator = copy.deepcopy(old.state_dict()), dict(old.named_parameters()), torch.get_rng_state()
    said, x = [], torch.randn(shape).to(dtype)
    torch.set_rng_state(generator)
    new = convert(nn.Sequential(old), report=said.append)[0]
    assert (type(new), new.channel_dim) == (StreamingNorm, channel_dim)
    assert "tried out on a few numbers" in table(said)["0"]
    assert dict(new.named_parameters()) == parameters
    assert all(torch.equal(value, before[name]) for name, value in old.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert new(x).isfinite().all()
    if dtype == torch.float32 and sample is not None:
        assert torch.allclose(quiet(nn.Sequential(old), SampleNorm, ref=sample)(x), old(x), atol=1e-5)
    elif dtype == torch.float32 and old._buffers:
        assert torch.allclose(quiet(nn.Sequential(old)).eval()(x), old.eval()(x), atol=1e-5)


class OffsetNorm(PlainLayerNorm):
    def forward(self, x):
        return super().forward(x) + super().forward(x) / self.weight


class SquareNorm(PlainLayerNorm):
    """With the gain that it has, the same."""

    def forward(self, x):
        return super().forward(x) * self.weight


class OtherEpsNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-2)


class MixedNorm(nn.LayerNorm):
    """As that of segmentation_models_pytorch: where channels are depends on the number of dimensions."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4 else super().forward(x)


class DroppingNorm(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class MaskedNorm(nn.GroupNorm):
    def __init__(self, size):
        super().__init__(2, size)

    def forward(self, x, mask=None):
        return super().forward(x)


class LateBatchNorm(nn.BatchNorm2d):
    """The same results, other running statistics."""

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.running_mean.mul_(0.5)
        return y


class ByNumberBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) if x.ndim == 2 else x


@pytest.mark.parametrize(
    "make",
    [OffsetNorm, SquareNorm, OtherEpsNorm, MixedNorm, DroppingNorm, MaskedNorm, LateBatchNorm, ByNumberBatchNorm],
)
def test_a_class_that_computes_something_else_is_left(make):
    model, said = nn.Sequential(make(6)), []
    before = copy.deepcopy(model.state_dict())
    convert(model, report=said.append)
    assert type(model[0]) is make
    assert "left alone" in table(said)["0"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_rms_norm_by_another_name():
    """As that of ImageGPT, whose class is called a layer norm."""
    named = type("ImageLayerNorm", (nn.Module,), {"forward": LlamaRMSNorm.forward})
    norm = named()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.ones(6)), 1e-6
    said = []
    convert(nn.Sequential(norm), report=said.append)
    assert "it subtracts no mean" in table(said)["0"]


# What is left, and what is told of it


def test_frozen_and_unknown_norms_are_left_and_said_so():
    class Other(BatchNormAct2d):
        def forward(self, x):
            return x

    class ConvNormActivation(nn.Sequential):
        """Holds a norm, and is none."""

    class NormalEstimator(nn.Module):
        pass

    model = nn.ModuleDict(
        {
            "batch": nn.BatchNorm2d(6),
            "frozen": FrozenBatchNorm2d(6),
            "graph": GraphNorm(6),
            "rms": LlamaRMSNorm(6),
            "other": Other(6),
            "block": ConvNormActivation(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
            "normal": NormalEstimator(),
            "local": nn.LocalResponseNorm(2),
            "weight": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        }
    )
    said = []
    convert(model, report=said.append)
    lines = table(said)
    assert set(lines) == {"batch", "frozen", "graph", "rms", "other", "block.1"}
    assert said[0].startswith("2 norms converted, 4 left alone: ")
    assert "there is no rule for its class (1)" in said[0]
    assert lines["frozen"].startswith("torchvision.ops.misc.FrozenBatchNorm2d left alone: it is frozen")
    assert lines["graph"].startswith("torch_geometric.nn.norm.graph_norm.GraphNorm left alone: there is no rule")
    assert "LlamaRMSNorm left alone: it subtracts no mean" in lines["rms"]
    assert "forward of its own, and the rule is for BatchNormAct2d" in lines["other"]
    advice = "\n".join(line for line in said if "  " not in line)
    for words in ("GraphNorm, Other: rules={cls: factory}", "LlamaRMSNorm: on request", "FrozenBatchNorm2d: trains"):
        assert words in advice
    assert "streamnorm.update_stats(model, loader)" in advice
    assert "starts afresh" not in advice


@of("transformers.models.gpt2.modeling_gpt2")
class GPT2Block(nn.Module):
    def __init__(self, gain=True, kind=nn.LayerNorm):
        super().__init__()
        self.ln_1 = kind(4, **({"elementwise_affine": gain} if kind is nn.LayerNorm else {}))


@pytest.mark.parametrize(
    ("model", "settings", "is_said"),
    [
        (GPT2Block(), {}, True),
        (nn.Sequential(GPT2Block()), {"skip": "0.ln_1"}, False),
        (GPT2Block(gain=False), {}, False),
        (GPT2Block(kind=nn.BatchNorm1d), {}, False),
        (nn.Sequential(nn.LayerNorm(4)), {}, False),
    ],
)
def test_weight_decay_by_transformers_is_spoken_of(model, settings, is_said):
    """Their Trainer spares layer norms by type."""
    said = []
    convert(model, report=said.append, **settings)
    assert any("get_decay_parameter_names" in line for line in said) == is_said


def test_nothing_is_said_of_streams_where_there_are_none():
    said = []
    convert(nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)), SampleNorm, report=said.append)
    assert not [line for line in said if "update_stats" in line or "afresh" in line]
    assert table(said)["1"] == "BatchNorm1d(4) -> SampleNorm(4); keeps no statistics"


def test_nothing_is_imported_for_them():
    before = set(sys.modules)
    quiet(nn.Sequential(BatchNormAct2d(6), FrozenBatchNorm2d(6), ConvNextLayerNorm(6)))
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"timm", "torchvision", "transformers"}


def test_a_class_of_the_same_name_elsewhere_is_not_taken_for_theirs():
    namesake = of("somebody.norms")(type("BatchNormAct2d", (nn.BatchNorm2d,), {"forward": lambda self, x: x}))
    assert type(quiet(nn.Sequential(namesake(6)))[0]) is namesake


# RMS norms, on request


@pytest.mark.parametrize("old", [LlamaRMSNorm(6), nn.RMSNorm(6), nn.RMSNorm(6, eps=1e-3)])
def test_rms_norms_on_request(old):
    """Sigma is theirs; the mean is subtracted too, so inputs without a mean give the same numbers."""
    old, x = shaken(old), torch.randn(4, 7, 6)
    new = quiet(old, SampleNorm, ref="SP5", rules={type(old): convert.rms})
    assert (new.center, new.channel_dim, new.bias) == ("zero", -1, None)
    assert new.weight is old.weight
    centred = x - x.mean(-1, keepdim=True)
    assert torch.allclose(new(centred), old(centred), atol=1e-5)
    assert not torch.allclose(new(x), old(x), atol=1e-2)
    streaming = quiet(old, rules={type(old): convert.rms})
    assert (type(streaming), streaming.center) == (StreamingNorm, "zero")
    assert streaming(x[:1]).isfinite().all()


def test_an_rms_norm_that_computes_something_else_is_left():
    class Gated(LlamaRMSNorm):
        def forward(self, x, gate):
            return super().forward(x) * gate

    model = nn.Sequential(GemmaRMSNorm(6), Gated(6), nn.RMSNorm(6, elementwise_affine=False))
    said = []
    convert(model, rules={type(norm): convert.rms for norm in model}, report=said.append)
    assert said[0].startswith("0 norms converted, 3 left alone: it computes something else")


# Rules of users


class Homemade(nn.Module):
    """A batch norm of somebody's own, with names of their own."""

    def __init__(self, size, epsilon=1e-3):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))
        self.register_buffer("average", torch.randn(size))
        self.register_buffer("spread", torch.rand(size) + 0.1)
        self.epsilon = epsilon

    def forward(self, x):
        return F.batch_norm(x, self.average, self.spread, self.gain, self.shift, self.training, eps=self.epsilon)


def homemade(old, make):
    return make(
        len(old.gain), eps=old.epsilon, weight=old.gain, bias=old.shift, mean=old.average, var=old.spread, warmup=7
    )


def test_a_rule_for_one_call():
    old, x = Homemade(3).eval(), torch.randn(5, 3)
    new = quiet(nn.Sequential(old), rules={Homemade: homemade})[0]
    assert (new.weight, new.bias, new.eps, new.warmup) == (old.gain, old.shift, 1e-3, 7)
    assert not new.training
    assert torch.allclose(new(x), old(x), atol=1e-6)
    assert quiet(nn.Sequential(old), warmup=9, rules={Homemade: homemade})[0].warmup == 9  # the call wins
    assert quiet(nn.Sequential(old), GeneralBatchNorm, rules={Homemade: lambda o, make: make(3)})[0].weight is None
    assert type(quiet(nn.Sequential(old))[0]) is Homemade  # the rule was for that call


def test_a_registered_rule_by_call_and_as_a_decorator():
    assert convert.register(Homemade, homemade) is homemade
    assert type(quiet(nn.Sequential(Homemade(3)))[0]) is StreamingNorm

    @convert.register(Homemade)
    def other(old, make):
        return nn.Sequential(make(3), nn.ReLU())

    said = []
    model = convert(nn.Sequential(Homemade(3)), report=said.append)
    assert [type(part) for part in model[0]] == [StreamingNorm, nn.ReLU]
    assert table(said)["0"].startswith("Homemade -> StreamingNorm(3), ReLU; starts afresh")
    assert other.__name__ == "other"
    assert type(quiet(nn.Sequential(Homemade(3)), rules={Homemade: homemade})[0]) is StreamingNorm  # of the call first
    assert quiet(nn.Sequential(Homemade(3)), rules={Homemade: lambda old, make: nn.Identity()})[0]._modules == {}


def test_a_rule_holds_for_subclasses_that_compute_the_same():
    class Renamed(Homemade):
        pass

    class Doubled(Homemade):
        def forward(self, x):
            return 2 * super().forward(x)

    class Stubborn(Homemade):
        def train(self, mode=True):
            return super().train(False)

    said = []
    model = nn.Sequential(Renamed(3), Doubled(3), Stubborn(3), Homemade(3))
    model[3].forward = lambda x: x
    convert(model, rules={Homemade: homemade}, report=said.append)
    assert [type(norm) for norm in model] == [StreamingNorm, Doubled, Stubborn, Homemade]
    assert "a forward of its own, and the rule is for Homemade" in table(said)["1"]
    assert "a train of its own" in table(said)["2"]
    special = quiet(nn.Sequential(Doubled(3)), rules={Homemade: homemade, Doubled: lambda old, make: make(3)})
    assert special[0].warmup == 256


@pytest.mark.parametrize(
    ("answer", "why"), [(None, "its rule leaves it"), ("not on Mondays", "not on Mondays"), ("old", "old")]
)
def test_a_rule_may_leave_a_norm(answer, why):
    model, said = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3)), []
    convert(model, rules={nn.BatchNorm1d: lambda old, make: answer}, report=said.append)
    assert [type(norm) for norm in model] == [nn.BatchNorm1d, StreamingNorm]
    assert said[0] == f"1 norm converted, 1 left alone: {why} (1)"


def test_a_rule_for_a_norm_of_ours_and_for_what_holds_norms():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.module(x)

    inner = SampleNorm(3)
    model, said = nn.Sequential(Wrapper(), inner), []
    rules = {Wrapper: lambda old, make: make(3, weight=old.module.weight), SampleNorm: lambda old, make: make(3)}
    convert(model, rules=rules, report=said.append)
    assert [type(norm) for norm in model] == [StreamingNorm, StreamingNorm]
    assert set(table(said)) == {"0", "1"}


def test_a_frozen_norm_is_thawed_by_a_rule():
    """Of constants parameters are made."""

    def thaw(old, make):
        return make(
            len(old.weight), eps=old.eps, weight=old.weight, bias=old.bias, mean=old.running_mean, var=old.running_var
        )

    old, x = FrozenBatchNorm2d(6), images()
    for name in ("weight", "bias", "running_mean"):
        nn.init.normal_(getattr(old, name))
    new = quiet(nn.Sequential(old).eval(), rules={FrozenBatchNorm2d: thaw})[0]
    assert torch.allclose(new(x), old(x), atol=1e-6)
    assert new.weight.requires_grad
    assert new.weight.data_ptr() != old.weight.data_ptr()


def test_skip_is_asked_about_what_has_a_rule():
    asked = []
    model = nn.ModuleDict(
        {"known": BatchNormAct2d(6), "own": Homemade(3), "unknown": GraphNorm(3), "batch": nn.BatchNorm1d(3)}
    )
    quiet(model, rules={Homemade: homemade}, skip=lambda name, module: asked.append(name) or name == "own")
    assert asked == ["known", "own", "batch"]
    assert isinstance(model["own"], Homemade)
    assert isinstance(model["known"], NormAct)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: convert.register("BatchNorm", homemade),
            TypeError,
            "'BatchNorm' is no class of modules: pass the class",
        ),
        (lambda: convert.register(int, homemade), TypeError, "int.* is no class of modules"),
        (lambda: convert.register(Homemade(3), homemade), TypeError, "is no class of modules"),
        (
            lambda: convert.register(Homemade, 3),
            TypeError,
            r"3 for Homemade cannot be called: pass a function \(old, make\)",
        ),
        (lambda: convert.register(Homemade)("no"), TypeError, "'no' for Homemade cannot be called"),
        (lambda: quiet(nn.ReLU(), rules=[Homemade]), TypeError, "rules=.*: pass a dict"),
        (lambda: quiet(nn.ReLU(), rules={"Homemade": homemade}), TypeError, "rules: 'Homemade' is no class"),
    ],
)
def test_what_is_no_rule_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert registry._registered == {}


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (lambda old, make: 3, TypeError, "for Homemade returned 3: a rule returns an nn.Module, a text"),
        (lambda old, make: StreamingNorm, TypeError, "returned <class .*StreamingNorm'>: a rule returns"),
        (lambda old, make: "", TypeError, "returned ''"),
        (lambda old, make: make(4, weight=old.gain), ValueError, r"weight of shape \(4,\), but Homemade has one of"),
        (lambda old, make: make(3, weight=old.gain * 2), TypeError, "computed from other parameters: pass a Parameter"),
        (lambda old, make: make(3, mean=old.average), ValueError, "one of mean= and var=: pass both"),
        (lambda old, make: make(3, mean=old.average[:2], var=old.spread), ValueError, r"must be \(num_features,\)"),
        (lambda old, make: make(3, momentum=1), TypeError, "takes no momentum="),
    ],
)
def test_after_a_refused_call_the_model_is_as_it_was(rule, error, words):
    model = nn.Sequential(nn.BatchNorm1d(3), Homemade(3), BatchNormAct2d(6))
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=words) as caught:
        quiet(model, rules={Homemade: rule})
    assert "while replacing 1; the model is as it was" in caught.value.__notes__[0]
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_parametrized_norm_of_another_library_is_left():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(LayerNorm(6), dim=None))
    before = model[0]
    assert quiet(model)[0] is before
    assert not [norm for norm in model.modules() if isinstance(norm, Norm)]
