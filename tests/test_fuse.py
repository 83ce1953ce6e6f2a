"""`fuse` by running an example: models that torch.fx cannot trace, classes that only rename layers, and reasons."""

import copy
import functools
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations

import streamnorm
from streamnorm import GRU, SampleNorm, StreamingNorm, TimeSpecificNorm
from streamnorm.nn.base import Norm

fuse = functools.partial(streamnorm.fuse, report=None)
C = 4


def used(model, x=None):
    """With gains, biases and statistics that are not the initial ones."""
    for norm in model.modules():
        if isinstance(norm, StreamingNorm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            size = (6, *(3,) * (0 if x is None else x.ndim - 2))
            shape = (size[0], norm.num_features, *size[1:]) if norm.channel_dim == 1 else (*size, norm.num_features)
            norm(torch.randn(shape) * 2 + 1)
    return model.eval()


def folded(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Identity)}


@torch.no_grad()
def close(one, other, *args, **kwargs):
    a, b = one(*args, **kwargs), other(*args, **kwargs)
    assert torch.allclose(a, b, atol=1e-4 * max(1, float(a.abs().max()))), float((a - b).abs().max())


def said_by(model, **options):
    """The report: what was folded or not, by name, and the other lines."""
    lines = []
    new = streamnorm.fuse(model, report=lines.append, **options)
    about = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines if "StreamingNorm(" in line}
    return new, about, [line for line in lines if "StreamingNorm(" not in line]


# ---- any wiring -----------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """Layers, norms and functions, in the order of a list; what nobody takes up is added up in the end."""

    def __init__(self, steps, hidden):
        super().__init__()
        self.steps, self.hidden = steps, hidden
        self.layers = nn.ModuleList([nn.Conv1d(C, C, 3, padding=1), Renamed(C, C, 1, bias=False), nn.Conv1d(C, C, 1)])
        self.norms = nn.ModuleList([StreamingNorm(C) for _ in range(3)])

    def forward(self, x):
        if self.hidden and float(x.sum()) > 1e9:  # which torch.fx cannot follow
            return x
        values = [x]
        for kind, which, *sources in self.steps:
            if kind == "layer":
                values.append(self.layers[which](values[sources[0]]))
            elif kind == "norm":
                values.append(self.norms[which](values[sources[0]]))
            elif kind == "in place":
                values[sources[0]].mul_(0.9)
            elif kind == "add":
                values.append(values[sources[0]] + values[sources[1]])
            else:
                values.append(torch.relu(values[sources[0]]))
        taken = {source for kind, _, *sources in self.steps for source in sources if kind != "in place"}
        return torch.stack([value for i, value in enumerate(values) if i not in taken]).sum(0)


class Renamed(nn.Conv1d):
    """A class of its own that computes what torch's does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.note = "as torchvision's Conv3DSimple"


def some_wiring(seed):
    draw = random.Random(seed)
    steps, values = [], 1
    for _ in range(draw.randint(4, 9)):
        latest = draw.random() < 0.7
        source = values - 1 if latest else draw.randrange(values)
        kind = draw.choice(["layer", "norm", "layer", "norm", "norm", "relu", "add", "in place"])
        if kind == "in place" and source == 0:
            continue
        sources = (source, draw.randrange(values)) if kind == "add" else (source,)
        steps.append((kind, draw.randrange(3), *sources))
        values += kind != "in place"
    return steps


def foldable(steps):
    """From the definition: every call of the norm takes what the layer gave, and nobody else ever does."""
    values, takers = [("input", 0)], [[]]
    for kind, which, *sources in steps:
        for source in sources:
            takers[source].append((kind, which))
        if kind != "in place":
            values.append((kind, which))
            takers.append([])
    for taken in takers:
        if all(kind == "in place" for kind, _ in taken):
            taken.append(("sum", 0))
    found = set()
    for norm in range(3):
        feeding = [values[sources[0]] for kind, which, *sources in steps if (kind, which) == ("norm", norm)]
        if len(set(feeding)) == 1 and feeding[0][0] == "layer":
            outputs = [taken for value, taken in zip(values, takers, strict=True) if value == feeding[0]]
            if all(taken == [("norm", norm)] for taken in outputs):
                found.add(f"norms.{norm}")
    return found


@pytest.mark.parametrize("hidden", [True, False])
def test_whatever_the_wiring_what_is_folded_is_what_the_definition_says(hidden):
    """Seen by running if it is hidden from torch.fx, else by tracing; other inputs, batches and lengths go through."""
    folds = 0
    for seed in range(40):
        torch.manual_seed(seed)
        steps = some_wiring(seed)
        model = used(Wired(steps, hidden), torch.zeros(1, C, 1))
        new = fuse(model, example=torch.randn(2, C, 5))
        assert folded(new) == foldable(steps), (seed, steps)
        for n, length in ((1, 3), (3, 8)):
            close(new, model, torch.randn(n, C, length) * 3)
        folds += len(folded(new))
    assert folds > 5


# ---- what an example cannot be trusted to show ----------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions and two norms, put together in one of many ways that torch.fx does not see."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.a, self.b = nn.Conv1d(C, C, 1), nn.Conv1d(C, C, 1)
        self.n, self.m = StreamingNorm(C), StreamingNorm(C)
        self.first, self.second = nn.Sequential(self.a), nn.Sequential(self.n)

    def forward(self, x, *, flag=None):
        float(x.sum())
        return self.m(self.b(getattr(self, self.way)(x)))

    def plain(self, x):
        return self.n(self.a(x))

    def parts(self, x):
        return self.second(self.first(x))

    def dropped(self, x):
        return self.n(F.dropout(nn.Identity()(self.a(x)), 0.5, self.training))

    def skipped(self, x):
        y = self.a(x)
        return self.n(y) + y

    def viewed(self, x):
        y = self.a(x)
        return self.n(y) + y.data.transpose(1, 2).transpose(1, 2)

    def weight_read(self, x):
        return self.n(self.a(x)) + F.conv1d(x, self.a.weight)

    def data_read(self, x):
        return self.n(self.a(x)) + F.conv1d(x, self.a.weight.data)

    def again(self, x):
        return self.n(self.a(x)) + self.a(x)

    def twice_the_same(self, x):
        y = self.a(x)
        return self.n(y).relu_() + self.n(y)

    def changed_before(self, x):
        return self.n(self.a(x).relu_())

    def branch_on_values(self, x):
        y = self.a(x)
        return self.n(y * 2 if x.mean() > 10 else y)

    def branch_on_what_was_read_before(self, x):
        high = bool(x.mean() > 0)
        y = self.a(x)
        return self.n(y * 2 if high else y)

    def branch_after(self, x):
        y = self.n(self.a(x))
        return y * 2 if y.mean() > 0 else y

    def kept(self, x):
        self.latest = self.a(x)
        return self.n(self.latest)

    def read_unseen(self, x):
        y = self.a(x)
        return self.n(y) + y.tolist()[0][0][0]

    def by_numpy(self, x):
        y = self.a(x)
        return self.n(y) + float(y.numpy().sum())

    def masked(self, x):
        return self.n(self.a(x), mask=torch.ones(1, 1, dtype=torch.bool))

    def scripted(self, x):
        y = self.a(x)
        return self.n(y) + torch.jit.script(doubled)(y)

    def unused(self, x):
        return x

    def without_gradients_of_its_own(self, x):
        with torch.enable_grad():
            return self.n(self.a(x)).detach()


def doubled(y: torch.Tensor) -> torch.Tensor:
    return y * 2


WAYS = {
    "plain": "",
    "parts": "",
    "dropped": "",
    "branch_after": "",
    "without_gradients_of_its_own": "",
    "skipped": "feeds more than this norm",
    "viewed": "feeds more than this norm",
    "again": "feeds more than this norm",
    "twice_the_same": "feeds more than this norm",
    "changed_before": "feeds more than this norm",
    "scripted": "feeds more than this norm",
    "weight_read": "weight of the layer before it is read",
    "data_read": "weight of the layer before it is read",
    "branch_on_values": "decides by values",
    "branch_on_what_was_read_before": "does not follow",
    "kept": "kept or returned",
    "by_numpy": "feeds more than this norm",
    "read_unseen": "would give something else",
    "masked": "called with more than its input",
    "unused": "does not reach it",
}


@pytest.mark.parametrize(("way", "reason"), WAYS.items())
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_the_example_shows_is_not_all(way, reason):
    """The norm n, in each way; the norm m is folded in all of them, also where n was taken back."""
    torch.manual_seed(0)
    model = used(Net(way), torch.zeros(1, C, 1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new, about, _ = said_by(model, example=torch.randn(2, C, 5) - 0.5)
    assert isinstance(new.n, nn.Identity) == (not reason)
    assert isinstance(new.m, nn.Identity)
    assert reason in about["n, second.0"]
    assert not [norm for norm in new.modules() if isinstance(norm, Norm)]
    for x in (torch.randn(3, C, 7), torch.randn(1, C, 2) + 1, torch.randn(2, C, 2) + 20):
        close(new, model, x)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert folded(fuse(model)) == set()  # without an example none of it is known


def test_a_hook_or_a_shared_layer_is_noticed():
    model = used(Net("plain"), torch.zeros(1, C, 1))
    model.a.register_forward_hook(lambda module, args, y: y + 1)
    x = torch.randn(2, C, 5)
    new, about, _ = said_by(model, example=x)
    assert "hook" in about["n, second.0"]
    assert folded(new) == {"m"}
    close(new, model, x)
    shared = used(Net("plain"), torch.zeros(1, C, 1))
    shared.b = shared.a  # one convolution, two norms
    assert folded(fuse(shared, example=x)) == set()
    tied = used(Net("plain"), torch.zeros(1, C, 1))
    tied.b.weight = tied.a.weight  # two convolutions, each with its norm
    new = fuse(tied, example=x)
    assert folded(new) == {"n", "m"}
    close(new, tied, x)


def test_attention_reads_the_weight_of_its_last_layer():
    """Its forward does not call the layer, which is of a class of torch without a forward of its own."""

    class Attending(nn.Module):
        def __init__(self, both):
            super().__init__()
            self.attention, self.both = nn.MultiheadAttention(C, 2, batch_first=True), both
            self.norm = StreamingNorm(C, channel_dim=-1)

        def forward(self, x):
            float(x.sum())
            y = self.norm(self.attention.out_proj(x))
            return y + self.attention(x, x, x)[0] if self.both else y

    x = torch.randn(2, 5, C)
    for both in (True, False):
        model = used(Attending(both), x)
        assert type(model.attention.out_proj) is NonDynamicallyQuantizableLinear
        new = fuse(model, example=x)
        assert folded(new) == (set() if both else {"norm"})
        close(new, model, torch.randn(3, 2, C))


def test_results_without_tensors_prove_nothing():
    class Counting(Net):
        def forward(self, x):
            return round(float(super().forward(x).sum()))

    model = used(Counting("plain"), torch.zeros(1, C, 1))
    new, about, _ = said_by(model, example=torch.randn(2, C, 5))
    assert folded(new) == set()
    assert "no tensors to compare" in about["m"]


def test_results_that_are_not_finite_are_compared_too():
    """As logits are that are masked: infinities do not hide a difference."""

    class Masked(Net):
        def forward(self, x):
            y = super().forward(x)
            return y.index_fill(2, torch.tensor([0]), -torch.inf).index_fill(2, torch.tensor([1]), torch.nan)

    x = torch.randn(2, C, 5)
    assert folded(fuse(used(Masked("plain"), torch.zeros(1, C, 1)), example=x)) == {"n", "m"}
    assert folded(fuse(used(Masked("read_unseen"), torch.zeros(1, C, 1)), example=x)) == {"m"}


def test_a_model_that_draws_numbers_draws_the_same_ones():
    class Sampling(Net):
        def forward(self, x):
            return super().forward(x) + torch.randn_like(x) * 10

    model = used(Sampling("plain"), torch.zeros(1, C, 1))
    before = torch.get_rng_state()
    assert folded(fuse(model, example=torch.ones(2, C, 5))) == {"n", "m"}
    assert torch.equal(torch.get_rng_state(), before)


def test_after_a_refused_call_nothing_has_changed():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), StreamingNorm(4)

        def forward(self, x):
            h = self.conv(x)
            return self.norm(h) + h if isinstance(x, torch.Tensor) else self.norm(h)

    x = torch.randn(8, 3, 5, 5)
    model = used(Sly(), x)
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="something else for the example than before"):
        fuse(model, example=x, inplace=True)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_in_place():
    model = used(Net("plain"), torch.zeros(1, C, 1))
    x, parameter = torch.randn(2, C, 5), model.a.weight
    before = model(x)
    assert fuse(model, example=x, inplace=True) is model
    assert torch.allclose(model(x), before, atol=1e-5)
    assert model.a.weight is not parameter
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- examples -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    logits: torch.Tensor
    labels: torch.Tensor


class Named(nn.Module):
    """As many models of transformers: everything by name, many options, a dataclass that comes out."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, C, 1, bias=False), StreamingNorm(C), nn.Linear(C, 2)

    def forward(self, pixels=None, mask=None, a=None, b=None, c=None, labels=None, **options):
        if pixels is None:
            raise ValueError("You have to specify pixels")
        x = self.norm(self.conv(pixels)).mean((2, 3))
        return Result(self.head(x), x.argmax(1) > 1)


class Whole(Named):
    def forward(self, batch):
        float(batch["x"].sum())
        return super().forward(batch["x"])


def test_examples_by_name_in_order_and_as_one():
    x = torch.randn(2, 3, 5, 5)
    named, whole = used(Named(), x), used(Whole(), x)
    for model, example in (
        (named, {"pixels": x, "labels": None}),
        (named, (x, None)),
        (named, x),
        (whole, {"x": x}),
        (whole, ({"x": x},)),
    ):
        new = fuse(model, example=example)
        assert folded(new) == {"norm"}
        assert folded(fuse(model)) == set()
        given = {"x": x} if model is whole else x
        assert torch.allclose(new(given).logits, model(given).logits, atol=1e-5)
        deployed = streamnorm.to_batchnorm(model, example=example, report=None)
        assert isinstance(deployed.norm, nn.BatchNorm2d)
    with pytest.raises(ValueError, match="specify pixels"):
        fuse(named, example={"mask": None})


# ---- classes without a forward of their own -------------------------------------------------------------------------


class Conv3DSimple(nn.Conv3d):
    """As in torchvision's r3d."""

    def __init__(self, planes, out):
        super().__init__(planes, out, kernel_size=(3, 3, 3), stride=1, padding=1, bias=False)

    @staticmethod
    def get_downsample_stride(stride):
        return stride, stride, stride


class DepthwiseConv2d(nn.Conv2d):
    """As in the EfficientNet of transformers."""

    def __init__(self, channels, multiplier=1):
        super().__init__(channels, channels * multiplier, 3, groups=channels, bias=False, padding="same")


class OwnInside(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


class OwnWeight(nn.Conv2d):
    @property
    def scaled(self):
        return 2 * self.weight


class Doubled(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize(
    ("layer", "shape", "why"),
    [
        (Conv3DSimple(3, C), (2, 3, 2, 3, 3), None),
        (DepthwiseConv2d(2, 2), (2, 2, 5, 5), None),
        (nn.Sequential(nn.ZeroPad2d(1), DepthwiseConv2d(C)), (2, C, 5, 5), None),
        (OwnWeight(3, C, 1), (2, 3, 5, 5), None),  # which nothing reads
        (NonDynamicallyQuantizableLinear(3, C), (5, 3), None),
        (OwnInside(3, C, 3), (2, 3, 5, 5), "forward of its own"),
        (OwnForward(3, C, 3), (2, 3, 5, 5), "forward of its own"),
        (Doubled(3, C), (5, 3), "does not follow"),
        (parametrizations.weight_norm(nn.Conv2d(3, C, 1)), (2, 3, 5, 5), "computed from other parameters"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("hidden", [True, False])
def test_classes_that_only_rename(layer, shape, why, hidden):
    class Hiding(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x

    x = torch.randn(shape)
    model = used((Hiding if hidden else nn.Sequential)(copy.deepcopy(layer), StreamingNorm(C), nn.ReLU()), x)
    model(x)
    new, about, _ = said_by(model, example=x)
    assert isinstance(new[1], nn.Identity) == (why is None)
    assert why is None or why in about["1"]
    close(new, model, torch.randn(shape))


def test_a_dictionary_with_a_forward_is_traced():
    """As the blocks of torchvision's DenseNet are."""

    class Layer(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm1, self.conv1 = StreamingNorm(size), nn.Conv2d(size, 6, 1, bias=False)
            self.norm2, self.conv2 = StreamingNorm(6), nn.Conv2d(6, 2, 3, padding=1, bias=False)

        def forward(self, features):
            x = self.conv1(torch.relu(self.norm1(torch.cat(features, 1))))
            return self.conv2(torch.relu(self.norm2(x)))

    class Block(nn.ModuleDict):
        def forward(self, x):
            features = [x]
            for layer in self.values():
                features.append(layer(features))
            return torch.cat(features, 1)

    x = torch.randn(2, 3, 5, 5)
    model = used(nn.Sequential(Block({f"layer{i}": Layer(3 + 2 * i) for i in range(3)}), StreamingNorm(9)), x)
    new, about, _ = said_by(model)
    assert folded(new) == {f"0.layer{i}.norm2" for i in range(3)}
    assert all("does not follow a convolution" in about[name] for name in ("0.layer0.norm1", "1"))
    close(new, model, torch.randn(1, 3, 4, 6))


# ---- reasons --------------------------------------------------------------------------------------------------------


def test_every_norm_that_is_not_folded_has_a_reason():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)
            self.both, self.idle, self.time = StreamingNorm(C), StreamingNorm(C), TimeSpecificNorm(C, 2)
            self.recurrent = GRU(C, C)

        def forward(self, x):
            y = self.time(self.both(self.a(x)) + self.both(self.b(x)))
            return self.recurrent(y[None])[0]

    model = nn.Sequential(nn.Linear(C, C), StreamingNorm(C, ref="BA6"), Several(), SampleNorm(C), nn.Linear(C, C))
    model.append(StreamingNorm(C))
    lines = []
    streamnorm.fuse(model, report=lines.append)
    about = {line.partition(": ")[0]: line for line in lines}
    assert "statistics for each location" in about["1"]
    assert "follows several layers" in about["2.both"]
    assert "nothing calls it" in about["2.idle"] or "cannot trace" in about["2.idle"]
    assert "for each timestep" in about["2.time"]
    assert "left alone: it normalizes each sample" in about["3"]
    assert "number of dimensions of its input is not known" in about["5"]
    inside = [line for name, line in about.items() if name.startswith("2.recurrent.")]
    assert inside
    assert all("inside of a recurrent layer" in line for line in inside)
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    assert lines[0].startswith(f"0 norms folded, {len(norms)} left: ")
    assert "the number of dimensions of its input is not known: pass example=, an input, for that" in lines


def test_the_report_sums_up_and_says_what_to_do():
    model = used(Net("plain"), torch.zeros(1, C, 1))
    _, about, others = said_by(model)
    assert others[0] == "0 norms folded, 2 left: it is called in code that torch.fx cannot trace (2)"
    assert (
        about["m"] == "StreamingNorm(4) -> BatchNorm1d(4); not folded: it is called in code that torch.fx cannot trace"
    )
    assert others[1:] == [
        "it is called in code that torch.fx cannot trace: pass example=, an input: fuse then looks how it runs"
    ]
    _, about, others = said_by(model, example=torch.randn(2, C, 5))
    assert others == ["2 norms folded, none left"]
    assert about["m"] == "StreamingNorm(4) folded into b"
