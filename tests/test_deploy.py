"""`to_batchnorm` and `fuse`: a model without our norms that evaluates to the same."""

import copy
import functools
import io

import pytest
import torch
from test_convert import Block, images, residual_net, trained
from torch import nn
from torch.nn.utils import parametrizations

import streamnorm
from streamnorm import GeneralBatchNorm, NormRef, SampleNorm, StreamingNorm, TimeSpecificNorm
from streamnorm.convert.deploy import FixedAffine
from streamnorm.core.reference import CODES
from streamnorm.nn.base import Norm

to_batchnorm = functools.partial(streamnorm.to_batchnorm, report=None)
fuse = functools.partial(streamnorm.fuse, report=None)
convert = functools.partial(streamnorm.convert, report=None)

SHAPES = [(6, 4), (6, 4, 5), (4, 4, 5, 6), (2, 4, 3, 4, 5)]
BATCHNORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def used(norm, shape, calls=3):
    """With gain, bias and statistics that are not the initial ones."""
    for p in norm.parameters():
        nn.init.normal_(p)
    for _ in range(calls):
        norm(torch.randn(shape) * 2 + 1)
    return norm


def same(one, other, x, tolerance=1e-5):
    one, other = copy.deepcopy(one).eval(), copy.deepcopy(other).eval()
    with torch.no_grad():
        a, b = one(x), other(x)
    assert a.dtype == b.dtype
    assert torch.allclose(a, b, atol=tolerance * max(1, float(a.abs().max()))), float((a - b).abs().max())


def ours(model):
    return [m for m in model.modules() if isinstance(m, Norm)]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_evaluation_is_the_same(code, p, shape):
    norm = used(StreamingNorm(4, ref=code, p=p), shape)
    new = to_batchnorm(norm)
    assert type(new) is (FixedAffine if CODES[code].located else BATCHNORMS[len(shape)])
    same(new, norm, torch.randn(shape))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("code", [code for code in CODES if code.startswith("BA")])
def test_general_batch_norms(code, affine):
    shape = (4, 4, 5, 6)
    norm = used(GeneralBatchNorm(4, ref=code, affine=affine, momentum=0.3), shape)
    new = to_batchnorm(norm)
    same(new, norm, torch.randn(shape))
    if not CODES[code].located:
        assert new.momentum == 0.3
        assert new.affine == affine
        same(new, norm, torch.randn(2, 4, 9, 9))  # of any size


@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
@pytest.mark.parametrize("ref", ["BA1", "BA2", "BA6", NormRef(True, "all", 3)])
def test_channels_last(kind, ref):
    norm = used(kind(4, ref=ref, channel_dim=-1), (3, 5, 4))
    new = to_batchnorm(norm)
    assert isinstance(new, FixedAffine)
    same(new, norm, torch.randn(3, 5, 4))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1e-2])
def test_small_and_large_eps(eps):
    """Also with statistics that were taken with a smaller one, and of channels that are constant."""
    x = torch.randn(16, 4) * torch.tensor([0 if eps else 1, 1e-3, 1, 30]) + torch.tensor([1, 2, 3, 4])
    norm = StreamingNorm(4, eps=eps, warmup=0, center="mean")
    norm(x)
    same(to_batchnorm(norm), norm, x)
    old = nn.BatchNorm1d(4, eps=1e-3, momentum=1.0)
    old(x)
    new = to_batchnorm(convert(old, eps=0.1))
    assert bool((new.running_var >= 0).all())
    same(new, old, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype):
    norm = used(StreamingNorm(4), (8, 4, 5)).to(dtype)
    x = torch.randn(8, 4, 5).to(dtype)
    new = to_batchnorm(norm)
    assert new.running_var.dtype == torch.promote_types(dtype, torch.float32)
    same(new, norm, x, 1e-5 if dtype == torch.float64 else 0.02)
    located = used(StreamingNorm(4, ref="BA6"), (8, 4, 5)).to(dtype)
    same(to_batchnorm(located), located, x, 1e-5 if dtype == torch.float64 else 0.02)


def test_a_gain_without_a_bias_and_one_that_is_computed():
    bare = used(convert(nn.LayerNorm(4, bias=False), channel_dim=1), (8, 4))
    computed = parametrizations.weight_norm(used(StreamingNorm(4), (8, 4)), dim=None)
    for norm in (bare, computed):
        same(to_batchnorm(norm), norm, torch.randn(8, 4))


def test_there_and_back():
    for old, shape in ((nn.BatchNorm1d, (6, 4)), (nn.BatchNorm2d, (6, 4, 3, 3)), (nn.BatchNorm3d, (6, 4, 3, 3, 3))):
        first = old(4, eps=1e-3)
        assert int(to_batchnorm(convert(first)).num_batches_tracked) == 0  # still fresh
        used(first, shape)
        back = to_batchnorm(convert(first))  # which knows the number of dimensions, without a call
        assert type(back) is old
        assert int(back.num_batches_tracked) > 0
        assert back.eps == 1e-3
        assert torch.allclose(back.running_mean, first.running_mean)
        assert torch.allclose(back.running_var, first.running_var)
        same(back, first, torch.randn(shape))


def test_a_copy_by_default_and_the_same_parameters_in_place():
    model = convert(residual_net())
    trained(model, images())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    copied = to_batchnorm(model)
    assert copied is not model
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    parameters = list(model.parameters())
    plain = copy.deepcopy(model)
    assert to_batchnorm(model, inplace=True) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for new in (model, copied):
        assert not ours(new)
        assert new.training
        assert not isinstance(new[1], FixedAffine)
        same(new, plain, images())


def test_the_deployed_model_stands_without_us():
    """A plain state_dict, for the same network with torch's norms."""
    model = convert(residual_net())
    trained(model, images())
    plain = residual_net()
    plain.load_state_dict(to_batchnorm(model).state_dict())
    same(plain, model, images())


def test_modes_hooks_and_sharing_stay():
    norm = used(StreamingNorm(4), (8, 4)).eval()
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    called = []
    handle = norm.register_forward_hook(lambda m, args, y: called.append(m))
    new = to_batchnorm(model, inplace=True)
    assert new[0] is new[2]
    assert (new.training, new[0].training) == (True, False)
    new(torch.randn(2, 4))
    assert called == [new[0]] * 2
    handle.remove()
    new(torch.randn(2, 4))
    assert len(called) == 2


def test_an_example_tells_the_number_of_dimensions():
    trained_one = used(StreamingNorm(4), (8, 4, 5, 5))
    loaded = StreamingNorm(4)
    loaded.load_state_dict(trained_one.state_dict())
    said = []
    x = torch.randn(8, 4, 5, 5)
    unknown = streamnorm.to_batchnorm(loaded, report=said.append)
    assert isinstance(unknown, FixedAffine)
    assert "pass example=" in said[0]
    same(unknown, loaded, x)
    for example in (x, (x,), (x, None)):
        new = to_batchnorm(loaded, example=example)
        assert isinstance(new, nn.BatchNorm2d)
        assert new.training
        same(new, loaded, x)
    assert not loaded._dims  # the copy was called


def test_where_no_batch_norm_serves():
    masked = StreamingNorm(4)
    masked(torch.randn(3, 4, 5), mask=torch.ones(3, 5, dtype=torch.bool))
    several = used(used(StreamingNorm(4), (3, 4)), (3, 4, 5, 5))
    many = used(StreamingNorm(4), (2, 4, 2, 2, 2, 2))
    for norm in (masked, several, many):
        assert isinstance(to_batchnorm(norm), FixedAffine)
    for shape in ((3, 4), (3, 4, 5, 5)):
        same(to_batchnorm(several), several, torch.randn(shape))
    same(to_batchnorm(many), many, torch.randn(2, 4, 3, 2, 2, 2))
    x, mask = torch.randn(3, 4, 5), torch.rand(3, 5) > 0.5
    new = to_batchnorm(masked)
    assert torch.allclose(new(x, mask=mask), masked.eval()(x, mask=mask), atol=1e-5)


def test_constants_of_another_size_are_refused():
    new = to_batchnorm(used(StreamingNorm(4, ref="BA6"), (3, 4, 5)))
    with pytest.raises(ValueError, match="constants are for"):
        new(torch.randn(3, 4, 1))
    with pytest.raises(ValueError, match="channels"):
        new(torch.randn(3, 3, 5))
    with pytest.raises(ValueError, match="both must be"):
        FixedAffine(torch.ones(3), torch.ones(3))
    fresh = StreamingNorm(4, ref="BA6")
    same(to_batchnorm(fresh), fresh, torch.randn(3, 4, 7))


def test_what_stays():
    class Own(StreamingNorm):
        def forward(self, x, mask=None, step=0):
            return 2 * super().forward(x, mask, step)

    model = nn.Sequential(nn.Linear(4, 4), SampleNorm(4), Own(4), nn.BatchNorm1d(4))
    said = []
    new = streamnorm.to_batchnorm(model, report=said.append)
    assert [type(m) for m in new] == [type(m) for m in model]
    assert "each sample by its own" in said[0]
    assert "forward of its own" in said[1]
    with pytest.raises(ValueError, match=r"model\.module"):
        to_batchnorm(nn.DataParallel(model))
    compiled = torch.compile(nn.Sequential(used(StreamingNorm(4), (3, 4))), backend="eager")
    assert isinstance(to_batchnorm(compiled)[0], nn.BatchNorm1d)


@pytest.mark.parametrize("norm", [StreamingNorm, functools.partial(TimeSpecificNorm, steps=4)])
@pytest.mark.parametrize("kind", [streamnorm.RNN, streamnorm.GRU, functools.partial(streamnorm.LSTM, cell_norm=True)])
def test_recurrent_layers(kind, norm):
    net, x = kind(3, 5, 2, norm=norm), torch.randn(6, 2, 3)  # past the last of 4 timesteps too
    for p in net.parameters():
        nn.init.normal_(p)
    net(x)
    for deployed in (to_batchnorm(net), fuse(net)):
        assert not ours(deployed)
        assert torch.allclose(deployed.eval()(x)[0], net.eval()(x)[0], atol=1e-5)


@pytest.mark.parametrize("ref", ["BA1", "BA6"])
def test_convolutional_recurrence(ref):
    net, x = streamnorm.ConvGRU(2, 3, norm=functools.partial(StreamingNorm, ref=ref)), torch.randn(2, 4, 2, 5, 5)
    net(x)
    assert torch.allclose(to_batchnorm(net).eval()(x)[0], net.eval()(x)[0], atol=1e-5)


def test_a_transformer():
    layer = convert(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    x = torch.randn(4, 5, 8) * 3 + 1
    layer(x)
    for new in (to_batchnorm(layer), fuse(layer)):
        assert not ours(new)
        same(new, layer, x)


# fuse


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("code", ["BA1", "BA2", "SP1", "SP2"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (functools.partial(nn.Linear, 6, 4), (5, 6)),
        (functools.partial(nn.Conv1d, 6, 4, 3, groups=2), (5, 6, 7)),
        (functools.partial(nn.Conv2d, 6, 4, 3, padding=1, padding_mode="reflect"), (5, 6, 7, 7)),
        (functools.partial(nn.Conv3d, 6, 4, 2), (2, 6, 3, 4, 3)),
        (functools.partial(nn.ConvTranspose1d, 6, 4, 3), (5, 6, 7)),
        (functools.partial(nn.ConvTranspose2d, 6, 4, 3, stride=2, groups=2), (5, 6, 4, 4)),
        (functools.partial(nn.ConvTranspose3d, 6, 4, 2, groups=2), (2, 6, 3, 4, 3)),
    ],
)
def test_a_norm_is_folded_into_the_layer_before_it(layer, shape, code, bias):
    model = nn.Sequential(layer(bias=bias), StreamingNorm(4, ref=code, p=1), nn.ReLU())
    trained(model, torch.randn(shape))
    new = fuse(model)
    assert isinstance(new[1], nn.Identity)
    assert type(new) is type(model)
    same(new, model, torch.randn(shape))
    assert bool(model[0].bias is not None) == bias  # the original is as it was


def test_channels_last_after_a_linear_layer():
    model = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4, channel_dim=-1), nn.Linear(4, 4), GeneralBatchNorm(4))
    x = torch.randn(6, 4, 3)  # where the second linear layer's channels are not the second norm's
    trained(model, x)
    new = fuse(model)
    assert isinstance(new[1], nn.Identity)
    assert isinstance(new[3], nn.BatchNorm1d)
    same(new, model, x)


def test_a_residual_network_folds_altogether():
    model = convert(residual_net())
    trained(model, images())
    said = []
    new = streamnorm.fuse(model, report=said.append)
    assert not ours(new)
    assert not [m for m in new.modules() if isinstance(m, nn.BatchNorm2d | FixedAffine)]
    assert "3.bn1: StreamingNorm(6) folded into 3.conv1" in said
    same(new, model, images())
    weights = list(model.parameters())
    assert fuse(model, inplace=True) is model
    same(new, model, images())
    assert model[6].weight is weights[-2]  # what was not folded stays


class Net(nn.Module):
    """Two convolutions and two norms, put together in one of many ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.a, self.b = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        self.n, self.m = StreamingNorm(4), StreamingNorm(4)

    def forward(self, x, extra=None, twice: bool = False):
        return getattr(self, self.way)(x, extra, twice)

    def plain(self, x, extra, twice):
        return self.m(self.b(torch.relu(self.n(self.a(x)))))

    def tied(self, x, extra, twice):  # the same pair again and again
        for _ in range(3):
            x = torch.relu(self.n(self.a(x)))
        return x

    def one_norm_two_convolutions(self, x, extra, twice):
        return self.n(self.a(x)) + self.n(self.b(x))

    def one_convolution_two_norms(self, x, extra, twice):
        return self.n(self.a(x)) + self.m(self.a(x))

    def also_used_raw(self, x, extra, twice):
        y = self.a(x)
        return y + self.n(y)

    def used_again_raw(self, x, extra, twice):
        return self.n(self.a(x)) + self.a(x)

    def norm_alone_too(self, x, extra, twice):
        return self.n(self.a(x)) + self.n(x)

    def something_between(self, x, extra, twice):
        return self.n(self.a(x) * 2)

    def weight_read(self, x, extra, twice):
        return self.n(self.a(x)) + nn.functional.conv1d(x, self.a.weight)

    def weight_read_elsewhere(self, x, extra, twice):
        return self.n(self.b(x)) + nn.functional.conv1d(x, self.b.weight)

    def branch_on_argument(self, x, extra, twice):
        y = self.a(x)
        if extra is not None:
            y = y + extra
        return self.n(y)

    def branch_on_absence(self, x, extra, twice):
        y = self.a(x)
        if extra is None:
            y = y * 2
        return self.n(y)

    def branch_on_flag(self, x, extra, twice):
        y = self.a(x)
        if twice:
            y = y * 2
        return self.m(self.b(self.n(y)))

    def branch_on_data(self, x, extra, twice):
        y = self.a(x)
        if y.mean() > 0:
            y = y * 2
        return self.n(y)

    def with_mask(self, x, extra, twice):
        mask = torch.ones(1, 1, dtype=torch.bool)
        return self.n(self.a(x), mask=mask)


@pytest.mark.parametrize(
    ("way", "folded"),
    [
        ("plain", {"n", "m"}),
        ("tied", {"n"}),
        ("one_norm_two_convolutions", set()),
        ("one_convolution_two_norms", set()),
        ("also_used_raw", set()),
        ("used_again_raw", set()),
        ("norm_alone_too", set()),
        ("something_between", set()),
        ("weight_read", set()),
        ("branch_on_argument", set()),
        ("branch_on_absence", set()),
        ("branch_on_flag", {"m"}),
        ("branch_on_data", set()),
        ("with_mask", set()),
    ],
)
def test_what_is_folded_is_right_however_the_network_is_wired(way, folded):
    model = Net(way)
    trained(model, torch.randn(3, 4, 5))
    new = fuse(model)
    assert {name for name in "nm" if isinstance(getattr(new, name), nn.Identity)} == folded
    assert not ours(new)
    x = torch.randn(3, 4, 5)
    same(new, model, x)
    for arguments in ((x, x), (x, None, True), (x, x, True)):
        assert torch.allclose(new.eval()(*arguments), model.eval()(*arguments), atol=1e-5)


class Untraceable(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        self.latest = x.detach()
        for part in self.parts:
            x = part(x) if float(x.detach().sum()) < 1e9 else x
        return x


def test_parts_of_what_cannot_be_traced_are_folded():
    """Blocks inside it, and around it; but not its own neighbours, or sequences that it may take apart."""
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), StreamingNorm(3), nn.ReLU())
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1),
        StreamingNorm(3),
        Untraceable(inner, nn.Conv2d(3, 3, 1), StreamingNorm(3), Block(3)),
        nn.Conv2d(3, 3, 1),
        StreamingNorm(3),
    )
    convert(model)
    x = torch.randn(4, 3, 5, 5)
    trained(model, x)
    new = fuse(model)
    assert not ours(new)
    folded = {name for name, m in new.named_modules() if isinstance(m, nn.Identity)}
    assert folded == {"1", "2.parts.3.bn1", "2.parts.3.bn2", "4"}
    assert isinstance(new[2].parts[0][1], nn.BatchNorm2d)
    assert isinstance(new[2].parts[2], nn.BatchNorm2d)
    same(new, model, x)
    assert isinstance(model[2].latest, torch.Tensor)  # tracing left nothing behind
    assert isinstance(new[2].latest, torch.Tensor)


def test_a_layer_that_an_untraceable_module_holds_too_is_not_folded():
    shared = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(shared, StreamingNorm(3), Untraceable(shared))
    x = torch.randn(4, 3, 5, 5)
    trained(model, x)
    new = fuse(model)
    assert isinstance(new[1], nn.BatchNorm2d)
    same(new, model, x)


def test_a_weight_that_is_read_under_another_name_is_not_folded():
    model = Net("weight_read_elsewhere")
    model.a.weight = model.b.weight
    trained(model, torch.randn(3, 4, 5))
    new = fuse(model)
    same(new, model, torch.randn(3, 4, 5))
    assert new.a.weight is new.b.weight


def test_tied_weights_are_untied_where_one_is_folded():
    model = nn.Sequential(nn.Linear(4, 4), StreamingNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    trained(model, torch.randn(8, 4))
    same(fuse(model), model, torch.randn(8, 4))


def test_hooks_parametrizations_and_subclasses_are_not_folded():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    def hooked(module):
        module.register_forward_hook(lambda m, args, y: y * 2)
        return module

    for layer, norm in (
        (hooked(nn.Linear(4, 4)), StreamingNorm(4)),
        (nn.Linear(4, 4), hooked(StreamingNorm(4))),
        (parametrizations.weight_norm(nn.Linear(4, 4)), StreamingNorm(4)),
        (Own(4, 4), StreamingNorm(4)),
        (nn.Linear(4, 4), StreamingNorm(4, ref="BA6")),
        (nn.Linear(4, 4), TimeSpecificNorm(4, 2)),
    ):
        model = nn.Sequential(layer, norm)
        trained(model, torch.randn(8, 4))
        new = fuse(model)
        assert not isinstance(new[1], nn.Identity)
        same(new, model, torch.randn(8, 4))


def test_a_linear_layer_is_folded_once_the_number_of_dimensions_is_known():
    model = nn.Sequential(nn.Linear(4, 4), StreamingNorm(4))
    trained(model, torch.randn(8, 4))
    loaded = nn.Sequential(nn.Linear(4, 4), StreamingNorm(4))
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    assert isinstance(fuse(loaded)[1], FixedAffine)
    new = fuse(loaded, example=x)
    assert isinstance(new[1], nn.Identity)
    same(new, model, x)


def test_a_converted_batch_norm_does_not_pass_for_one_of_vectors():
    """BatchNorm1d takes two dimensions and three: with three, a linear layer has its channels elsewhere."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4, 4)
    trained(model, x)
    same(fuse(convert(model, inplace=False)), model, x)
    vectors = convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    trained(vectors, torch.randn(8, 4))
    assert isinstance(fuse(vectors)[1], nn.Identity)


@pytest.mark.parametrize("make", [to_batchnorm, fuse])
def test_the_result_is_saved_and_exported(make):
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), StreamingNorm(4, ref="BA6")))
    x = torch.randn(4, 3, 5, 5)
    trained(model, x)
    new = make(model).eval()
    file = io.BytesIO()
    torch.save(new, file)
    file.seek(0)
    same(torch.load(file, weights_only=False), model, x)
    program = torch.export.export(new, (x,))
    assert torch.allclose(program.module()(x), new(x), atol=1e-6)


class Rectified(StreamingNorm):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).relu()


class Collecting(nn.Module):
    """Takes its sequence apart, and cannot be traced."""

    def __init__(self, *parts):
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        found = []
        for part in self.body:
            x = part(x)
            found.append(x.mean())
        return x + torch.stack(found).sum() if float(x.detach().sum()) < 1e9 else x


class Conditional(nn.Module):
    def __init__(self, conv, norm):
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x, condition):
        h = self.conv(x)
        return h if condition is None else self.norm(h)


def patched(conv, norm):
    conv.forward = lambda x: nn.Conv2d.forward(conv, x) + 1
    return nn.Sequential(conv, norm)


def hooked(conv, norm):
    inner = nn.Sequential(conv)
    inner.register_forward_hook(lambda module, args, output: output + output.mean())
    return nn.Sequential(inner, norm)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (lambda conv, norm: nn.Sequential(conv, Rectified(4)), ()),
        (patched, ()),
        (hooked, ()),
        (Collecting, ()),
        (lambda conv, norm: Collecting(nn.Sequential(conv), norm), ()),
        (Conditional, (None,)),
        (Conditional, (1,)),
    ],
)
def test_what_is_used_otherwise_is_not_folded(build, arguments):
    torch.manual_seed(0)
    model = build(nn.Conv2d(3, 4, 1), StreamingNorm(4))
    norm = next(m for m in model.modules() if isinstance(m, StreamingNorm))
    norm(torch.randn(8, 4, 5, 5) * 3 + 1)
    x = torch.randn(2, 3, 5, 5)
    before = model.eval()(x, *arguments)
    assert torch.allclose(fuse(model, report=None)(x, *arguments), before, atol=1e-5)


def test_an_example_shows_what_tracing_did_not():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), StreamingNorm(4)

        def forward(self, x):
            h = self.conv(x)
            return self.norm(h) + h if isinstance(x, torch.Tensor) else self.norm(h)

    model, x = Sly(), torch.randn(8, 3, 5, 5)
    model(x)
    with pytest.raises(RuntimeError, match="something else for the example than before"):
        fuse(model, example=x)
    assert isinstance(to_batchnorm(model, example=x).norm, nn.BatchNorm2d)


def test_a_norm_that_is_told_timesteps_becomes_one_that_takes_them():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = StreamingNorm(3)

        def forward(self, x):
            for step in range(3):
                x = self.norm(x, step=step)
            return x

    model, x = Loop(), torch.randn(6, 3)
    model(x)
    same(to_batchnorm(model), model, x)


def test_a_fresh_norm_is_fresh_on_the_way_back():
    model = nn.Sequential(StreamingNorm(3))
    model.eval()(torch.randn(4, 3))
    back = convert(to_batchnorm(model))
    assert back[0].state.stats.empty
    assert back[0].state.seen == 0
