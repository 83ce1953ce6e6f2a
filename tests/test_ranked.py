"""Norms for inputs of one rank, and norms that find their size: StreamingNorm in all but their first call."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import streamnorm
from streamnorm import (
    RNN,
    LazyStreamingNorm,
    LazyStreamingNorm1d,
    LazyStreamingNorm2d,
    LazyStreamingNorm3d,
    StreamingNorm,
    StreamingNorm1d,
    StreamingNorm2d,
    StreamingNorm3d,
    backends,
    convert,
    fuse,
    monitor,
    to_batchnorm,
    update_stats,
)
from streamnorm.core.reference import CODES

RANKED = {StreamingNorm1d: nn.BatchNorm1d, StreamingNorm2d: nn.BatchNorm2d, StreamingNorm3d: nn.BatchNorm3d}
LAZY = {
    LazyStreamingNorm: StreamingNorm,
    LazyStreamingNorm1d: StreamingNorm1d,
    LazyStreamingNorm2d: StreamingNorm2d,
    LazyStreamingNorm3d: StreamingNorm3d,
}
SHAPES = [(3,), (4, 3), (4, 3, 5), (4, 3, 5, 2), (4, 3, 2, 2, 2), (4, 3, 2, 2, 2, 2)]
INPUTS = {LazyStreamingNorm1d: (4, 3), LazyStreamingNorm2d: (4, 3, 5, 2), LazyStreamingNorm3d: (4, 3, 2, 2, 2)}
images = torch.randn(4, 3, 5, 5)


def refuses(norm, x):
    try:
        norm(x)
    except ValueError as error:
        return str(error)
    return None


def state_of(norm):
    return {name: tensor.clone() for name, tensor in norm.state_dict().items()}


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Ranks


@pytest.mark.parametrize("kind", RANKED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("serves", ["cpu", "plain"])
def test_ranks_are_those_of_torch(kind, serves):
    """Whatever it was called with before, many times included."""
    if serves not in backends.available():
        pytest.skip("no kernels here")
    good = next(shape for shape in SHAPES if not refuses(RANKED[kind](3), torch.randn(shape)))
    for shape in SHAPES:
        norm = kind(3)
        with backends.use(serves):
            for _ in range(3):
                norm(torch.randn(good))
            before, dims = state_of(norm), norm._dims
            said = refuses(norm, torch.randn(shape))
        assert (said is None) == (refuses(RANKED[kind](3), torch.randn(shape)) is None)
        if said:
            assert said.startswith(f"input of shape {shape} has {len(shape)} dimension(s): {kind.__name__} takes (N, C")
            assert is_same(before, state_of(norm))
            assert norm._dims == dims


REFUSALS = [
    (StreamingNorm1d(3), (3,), r"takes \(N, C\) or \(N, C, L\); for one sample pass x.unsqueeze\(0\)$"),
    (StreamingNorm1d(3), (4,), r"takes \(N, C\) or \(N, C, L\)$"),
    (StreamingNorm1d(3), (4, 3, 5, 5), r"; use StreamingNorm2d or StreamingNorm, which takes any$"),
    (StreamingNorm2d(3), (3, 5, 5), r"takes \(N, C, H, W\); for one sample pass x.unsqueeze\(0\)$"),
    (StreamingNorm2d(3), (4, 3, 5), r"; use StreamingNorm1d or StreamingNorm, which takes any$"),
    (StreamingNorm2d(3, channel_dim=-1), (5, 5, 3), r"takes \(N, H, W, C\); for one sample pass x.unsqueeze\(0\)$"),
    (StreamingNorm3d(3), (4, 3, 2, 2, 2, 2), r"takes \(N, C, D, H, W\); use StreamingNorm, which takes any$"),
]


@pytest.mark.parametrize(("norm", "shape", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_a_wrong_rank_is_told_what_to_do(norm, shape, message):
    with pytest.raises(ValueError, match=message):
        norm(torch.zeros(shape))


def test_a_ranked_norm_is_a_streaming_norm():
    """The same numbers, state and file; `to_batchnorm` knows its rank before any call, and convert leaves it alone."""
    plain, ranked = StreamingNorm(3, p=1), StreamingNorm2d(3, p=1)
    for _ in range(2):
        results = []
        for norm in (plain, ranked):
            x = images.clone().requires_grad_()
            norm(x).square().sum().backward()
            results.append((x.grad, norm.weight.grad, norm.eval()(images)))
            norm.train().weights_updated()
        assert all(map(torch.equal, *results))
    assert is_same(plain.state_dict(), ranked.state_dict())
    fresh = StreamingNorm2d(3, p=1)
    fresh.load_state_dict(plain.state_dict())
    assert repr(to_batchnorm(nn.Sequential(fresh), report=None)[0]).startswith("BatchNorm2d(3")
    assert type(to_batchnorm(StreamingNorm1d(3), report=None)) is nn.BatchNorm1d
    assert type(convert(nn.Sequential(ranked), report=None)[0]) is StreamingNorm2d
    assert type(convert(nn.BatchNorm2d(3), norm=StreamingNorm2d, report=None)) is StreamingNorm2d


def test_sequences_of_ranked_norms_are_served_alike():
    torch.manual_seed(0)
    plain, ranked = RNN(3, 4), RNN(3, 4, norm=StreamingNorm1d)
    ranked.load_state_dict(plain.state_dict())
    x = torch.randn(5, 2, 3)
    assert torch.equal(plain(x)[0], ranked(x)[0])
    assert backends.explain(ranked, x) == backends.explain(plain, x)
    with pytest.raises(ValueError, match=r"StreamingNorm2d takes \(N, C, H, W\)"):
        RNN(3, 4, norm=StreamingNorm2d)(x)


# Sizes found at the first call


@pytest.mark.parametrize("lazy", LAZY, ids=lambda kind: kind.__name__)
def test_a_first_call_makes_it_the_sized_norm(lazy):
    """Its parameters are the objects that they were, so an optimizer may have them already."""
    made, shape = lazy(p=1, beta=(0.5, 0.25, 0.25)), INPUTS.get(lazy, (4, 3))
    assert repr(made) == f"{lazy.__name__}(p=1.0, beta=(0.5, 0.25, 0.25))"
    parameters, optimizer = list(made.parameters()), torch.optim.SGD(made.parameters(), 0.1)
    assert all(map(is_lazy, parameters))
    sized = LAZY[lazy](3, p=1, beta=(0.5, 0.25, 0.25))
    for norm, steps in ((made, optimizer), (sized, torch.optim.SGD(sized.parameters(), 0.1))):
        torch.manual_seed(0)
        for _ in range(2):
            norm(torch.randn(shape)).square().sum().backward()
            steps.step()
    assert type(made) is LAZY[lazy]
    assert repr(made) == repr(sized)
    assert all(a is b for a, b in zip(parameters, made.parameters(), strict=True))
    assert made._pulse.updates == 2
    assert is_same(made.state_dict(), sized.state_dict())
    assert made._forward_pre_hooks == sized._forward_pre_hooks  # nothing is left of it


@pytest.mark.parametrize("ref", CODES)
@pytest.mark.parametrize("affine", [True, False])
def test_every_reference_can_be_lazy(ref, affine):
    """The first call may be in evaluation, and without gradients: then nothing of that sticks to the parameters."""
    made, sized = (
        LazyStreamingNorm(ref=ref, affine=affine, channel_dim=-1),
        StreamingNorm(3, ref=ref, affine=affine, channel_dim=-1),
    )
    x = images.movedim(1, -1)
    for norm in (made, sized):
        with torch.inference_mode():
            norm.eval()(x)
        norm.train()(x).sum()
        if affine:
            norm(x).square().sum().backward()
    assert is_same(made.state_dict(), sized.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies_are_lazy_too(copied):
    norm = nn.Sequential(LazyStreamingNorm2d(channel_dim=-1).double())
    twin = copied(norm)
    twin(torch.randn(2, 5, 5, 7, dtype=torch.float64))
    assert repr(norm[0]) == "LazyStreamingNorm2d(channel_dim=-1)"
    assert repr(twin[0]) == "StreamingNorm2d(7, channel_dim=-1)"
    assert twin[0].mean.dtype == twin[0].weight.dtype == torch.float64
    norm(torch.randn(2, 5, 5, 6, dtype=torch.float64))
    assert len(norm[0].mean) == 6


BAD_CALLS = [
    ({}, torch.zeros(3), None, ValueError, "dimension"),
    ({}, torch.zeros(4, 3, dtype=torch.int64), None, TypeError, "dtype torch.int64"),
    ({}, torch.zeros(0, 3), None, ValueError, "is empty"),
    ({}, torch.zeros(4, 0), None, ValueError, "num_features=0"),
    ({}, [1.0], None, TypeError, "input is list"),
    ({}, torch.zeros(4, 3), torch.ones(3, dtype=torch.bool), ValueError, "mask of shape"),
    ({"center": "mean"}, torch.zeros(1, 3), None, ValueError, "one element per statistic"),
    ({"center": "mean", "ref": "SP5"}, torch.zeros(4, 1, 5), None, ValueError, "num_features=1 has one element"),
]


@pytest.mark.parametrize(("settings", "x", "mask", "kind", "message"), BAD_CALLS, ids=[m for *_, m in BAD_CALLS])
def test_a_refused_call_leaves_it_lazy(settings, x, mask, kind, message):
    norm = LazyStreamingNorm(**settings)
    with pytest.raises(kind, match=message):
        norm(x, mask=mask)
    assert type(norm) is LazyStreamingNorm
    assert norm.num_features == 0
    assert norm._dims == frozenset()
    assert all(map(is_lazy, norm.parameters()))
    assert norm(torch.randn(2, 5)).shape == (2, 5)


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_of_lazy_norms(affine):
    trained = StreamingNorm(3, affine=affine)
    trained(images)
    still = LazyStreamingNorm(affine=affine)
    still.load_state_dict(LazyStreamingNorm(affine=affine).state_dict())
    assert still.num_features == 0
    still.load_state_dict(trained.state_dict())
    assert torch.equal(still.eval()(images), trained.eval()(images))
    assert type(still) is StreamingNorm
    batch_norm, started = nn.BatchNorm2d(3, affine=affine), LazyStreamingNorm2d(affine=affine)
    batch_norm(images)
    started.load_state_dict(batch_norm.state_dict())
    torch.testing.assert_close(started.eval()(images), batch_norm.eval()(images))
    with pytest.raises(ValueError, match="has 4 channels"):
        started(torch.randn(2, 4, 5, 5))
    for ref in ("BA2", "BA5"):  # whose state does not tell the size
        other, sized = LazyStreamingNorm(affine=False, ref=ref), StreamingNorm(3, affine=False, ref=ref)
        sized(images)
        other.load_state_dict(sized.state_dict())
        other(images)
        assert other.num_features == 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch itself
def test_a_first_call_may_be_compiled():
    torch._dynamo.reset()  # what other tests compiled counts
    model = nn.Sequential(nn.Conv2d(3, 4, 3), LazyStreamingNorm2d())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(images).sum().backward()
    assert repr(model[1]) == "StreamingNorm2d(4)"
    assert (int(model[1].stats.count), int(model[1].grads.count)) == (1, 1)
    assert model[1].weight.grad.shape == (4,)
    with pytest.raises(Exception, match=r"takes \(N, C, H, W\)"):
        torch.compile(model[1], backend="eager")(images[0])


def test_what_reads_norms_knows_lazy_ones():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), LazyStreamingNorm())
    said = []
    assert type(to_batchnorm(model, report=said.append)[1]) is LazyStreamingNorm
    assert said == ["1: LazyStreamingNorm(0) left alone: it is lazy and has no size yet: " + said[0].split(": ")[-1]]
    assert type(to_batchnorm(model, example=images, report=None)[1]) is nn.BatchNorm2d
    assert type(fuse(model, example=images, report=None)[1]) is nn.Identity
    assert type(model[1]) is LazyStreamingNorm
    assert monitor(model)["1"].notes == ["never called"]
    with pytest.raises(TypeError, match="no size yet: run one batch"):
        torch.fx.symbolic_trace(model)
    model.reset = [each.reset_parameters() for each in model]
    update_stats(model, [images, images])
    assert type(model[1]) is StreamingNorm
    assert model[1].mean.shape == (4,)


def test_lazy_norms_take_the_settings_of_sized_ones():
    """And no size, which they find."""
    for lazy, kind in LAZY.items():
        taken = dict(inspect.signature(kind).parameters)
        del taken["num_features"]
        assert dict(inspect.signature(lazy).parameters) == taken
        for build in (partial(lazy, 3), partial(lazy, num_features=3), partial(RNN, 2, 3, norm=lazy)):
            with pytest.raises(TypeError, match=rf"^{lazy.__name__}\(\) finds num_features at its first call: "):
                build()
        with pytest.raises(TypeError, match=rf"^{lazy.__name__}\(\) takes no momentum="):
            lazy(momentum=0.1)
        assert eval(repr(lazy(p=3)), vars(streamnorm)).p == 3
