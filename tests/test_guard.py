"""The guard: full windows follow the paper bit for bit but for large samples, small ones do not blow up.

What it computes is checked against the oracle in test_exactness.py; here are the laws around it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from streamnorm import GRU, RNN, DecoupledUpdate, GeneralBatchNorm, StreamingNorm, convert, kernels
from streamnorm.core.state import to_dict

PATHS = {"kernels": nullcontext, "plain": kernels.disabled}
WINDOWS = {  # sizes of the batches of each window
    "one batch": [[256], [300], [256], [999]],
    "two batches": [[128, 128], [254, 2], [128, 129], [200, 56]],
    "many batches": [[4] * 64, [4] * 65, [4] * 64],
}


def train(layer, windows, shape=(3,), seed=0):
    """Outputs and gradients of every call, with a weight update after each window."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for window in windows:
        for size in window:
            x = torch.randn(size, *shape, generator=generator, requires_grad=True)
            y = layer(x)
            y.backward(torch.randn(y.shape, generator=generator))
            seen += [y.detach(), x.grad]
        if isinstance(layer, StreamingNorm):
            layer.weights_updated()
    return seen


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def pair(**settings):
    return StreamingNorm(3, **settings), StreamingNorm(3, guard=False, **settings)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("warmup", [0, 50, 256])
@pytest.mark.parametrize("settings", [{}, {"p": 1.0, "beta": (0.5, 0.2, 0.3)}, {"alpha": (0.97, 0.03)}])
def test_full_windows_follow_the_paper_bit_for_bit(path, windows, warmup, settings):
    ours, papers = pair(warmup=warmup, **settings)
    with PATHS[path]():
        assert same(train(ours, windows), train(papers, windows))
    assert same(to_dict(ours.state).values(), to_dict(papers.state).values())


@pytest.mark.parametrize("path", PATHS)
def test_22_images_are_a_full_window(path):
    """However large they are: pixels of one image are alike, and count for twelve elements at most."""
    ours, papers = pair()
    with PATHS[path]():
        assert same(train(ours, [[22]] * 5, (3, 3, 4)), train(papers, [[22]] * 5, (3, 3, 4)))
        assert same(train(ours, [[1] * 22] * 5, (3, 31)), train(papers, [[1] * 22] * 5, (3, 31)))
        assert same(train(ours, [[22]] * 5, (3, 9, 9)), train(papers, [[22]] * 5, (3, 9, 9)))
        assert not same(train(ours, [[21]] * 5, (3, 9, 9)), train(papers, [[21]] * 5, (3, 9, 9)))
        assert not same(train(ours, [[22]] * 5, (3, 11)), train(papers, [[22]] * 5, (3, 11)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("samples", "part"), [(4, 1 / 16), (32, 1 / 4), (256, 1)])
def test_a_window_counts_for_its_part_of_a_full_one_to_the_two_thirds(path, samples, part):
    layer = StreamingNorm(3, warmup=0, center="zero")
    with PATHS[path]():
        layer(torch.zeros(samples, 3)).sum().backward()
        layer.weights_updated()
        layer(torch.ones(samples, 3))
    torch.testing.assert_close(layer.mean, torch.full((3,), 0.3 * part))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("windows", [[[1] * 22] * 4, [[22, 22]] * 4, [[1, 21], [3, 23], [22]]], ids=str)
def test_a_sample_with_statistics_of_its_own_goes_half_by_its_own_gradient(path, windows):
    """In windows of several batches: beta2 is divided between `short` and the own gradient, and no more changes."""
    ours, papers = StreamingNorm(3), StreamingNorm(3, guard=False, eval_memory=64)
    with PATHS[path]():
        first = [[11, 11]]  # is it full? Not known yet
        assert same(train(ours, first, (3, 8, 4)), train(papers, first, (3, 8, 4)))
        papers.beta = (0.7, 0.15, 0.15)
        for a, b in zip(train(ours, windows, (3, 8, 4)), train(papers, windows, (3, 8, 4)), strict=True):
            torch.testing.assert_close(a, b)
        for field, value in to_dict(ours.state).items():
            torch.testing.assert_close(value, to_dict(papers.state)[field])
        ours, papers = pair(beta=(0, 1, 0))  # there is no long memory
        assert same(train(ours, windows, (3, 8, 4)), train(papers, windows, (3, 8, 4)))


@pytest.mark.parametrize("path", PATHS)
def test_padding_is_no_location(path):
    """Samples of 40 places, 31 of them real."""
    ours, papers = pair()
    mask = torch.arange(40) < 31
    with PATHS[path]():
        for real, alike in ((mask, True), (torch.arange(40) < 32, False)):
            results = []
            for layer in (ours, papers):
                generator = torch.Generator().manual_seed(0)
                for i in range(96):
                    x = torch.randn(1, 3, 40, generator=generator, requires_grad=True)
                    layer(x, mask=real.expand(1, -1)).square().sum().backward()
                    if i % 32 == 31:
                        layer.weights_updated()
                results.append([x.grad])
            assert same(*results) == alike


@pytest.mark.parametrize("layer", [RNN, GRU])
def test_a_sequence_counts_once(layer):
    """Its timesteps are alike, however many there are."""
    torch.manual_seed(0)
    ours = layer(3, 5)
    papers = copy.deepcopy(ours)
    for norm in papers.modules():
        if isinstance(norm, StreamingNorm):
            norm.guard = False
    for samples, alike in ((256, True), (255, False)):
        results = []
        for model in (ours, papers):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(1)
            for _ in range(4):
                output, _ = model(torch.randn(5, samples, 3, generator=generator))
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([output.detach(), *(p.detach() for p in model.parameters())])
        assert same(*results) == alike


@pytest.mark.parametrize("path", PATHS)
def test_small_windows_are_guarded_until_one_is_full(path):
    """What a window will hold is not known: it counts as the one before until it holds more."""
    ours, papers = pair(warmup=0)
    with PATHS[path]():
        train(ours, [[4], [4]])
        ours(torch.randn(254, 3)).sum().backward()  # folds the small window, begins one that is not full yet
        papers.load_state_dict(ours.state_dict())
        twins = copy.deepcopy(ours), copy.deepcopy(papers)
        assert not same(*(train(layer, [[1]]) for layer in twins))
        assert same(train(ours, [[2, 1]]), train(papers, [[2, 1]]))  # now it is
        assert same(train(ours, [[4]]), train(papers, [[4]]))  # after a full one; when it ends it is known to be small
        assert not same(train(ours, [[4]]), train(papers, [[4]]))
    assert int(ours.elements_before) == 4


def test_the_first_window_and_a_layer_without_long_memory_are_left_alone():
    ours, papers = pair(warmup=0)
    assert same(train(ours, [[1, 2, 1]]), train(papers, [[1, 2, 1]]))
    batch = GeneralBatchNorm(3)
    streaming = StreamingNorm(3, center="mean", alpha=(0, 1), beta=(0, 0, 1), warmup=0)
    for a, b in zip(train(batch, [[4]] * 3), train(streaming, [[4]] * 3), strict=True):
        torch.testing.assert_close(a, b)


def test_the_long_term_average_is_exact_at_first():
    """Windows of one, however long the memory: no sample counts for more than another."""
    layer = StreamingNorm(3, alpha=(0.999, 0.001), center="zero", warmup=0, dtype=torch.float64)
    x = torch.randn(20, 3, dtype=torch.float64)
    for row in x:
        layer(row[None])
        layer.weights_updated()
    layer(x[:1])  # folds the last one
    average = torch.stack([x.mean(0), (x.square() + layer.eps).sqrt().mean(0)])
    torch.testing.assert_close(layer.stats.long, average)


@pytest.mark.parametrize("path", PATHS)
def test_a_spike_is_not_passed_on_for_long(path):
    """A gradient of the statistics a million times the usual one: the next samples do not inherit it."""
    lengths = {}
    for guard in (True, False):
        layer = StreamingNorm(3, guard=guard, warmup=0)
        with PATHS[path]():
            train(layer, [[1]] * 40)
            for update in range(3):
                x = torch.randn(1, 3, generator=torch.Generator().manual_seed(update), requires_grad=True)
                layer(x).backward(torch.full((1, 3), 1.0 if update else 1e6))
                layer.weights_updated()
        lengths[guard] = float(x.grad.norm())
    assert lengths[False] > 1e3
    assert lengths[True] < 100


SCALES = [(torch.float32, e) for e in (-110, -80, -60, 60, 80, 110)] + [(torch.float64, e) for e in (-900, 900)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "exponent"), SCALES)
@pytest.mark.parametrize("beta", [(0.7, 0.3, 0.0), (0.7, 0.0, 0.3)])
def test_the_scale_of_the_loss_scales_gradients_and_nothing_else(path, dtype, exponent, beta):
    """By powers of two, so that no rounding differs, as far as the type reaches: lengths do not overflow or vanish."""
    grads = []
    for scale in (1.0, 2.0**exponent):
        layer, generator = StreamingNorm(3, beta=beta, dtype=dtype), torch.Generator().manual_seed(0)
        with PATHS[path]():
            for _ in range(12):
                x, dy = (torch.randn(2, 3, generator=generator, dtype=dtype) for _ in range(2))
                layer(x.requires_grad_()).backward(dy * scale)
                layer.weights_updated()
                grads.append(x.grad / scale)
    assert float(layer.grads.short.abs().max()) > 0
    for a, b in zip(grads[:12], grads[12:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)


@pytest.mark.parametrize("scale", [2.0**-110, 2.0**-70, 1.0, 2.0**70, 2.0**110])
def test_kernels_and_plain_bound_extreme_gradients_alike(scale):
    grads = []
    for path in PATHS.values():
        layer, generator = StreamingNorm(3, warmup=0), torch.Generator().manual_seed(0)
        with path():
            for update in range(12):
                x, dy = (torch.randn(1, 3, generator=generator) for _ in range(2))
                layer(x.requires_grad_()).backward(dy * (scale if update % 2 else 1.0))
                layer.weights_updated()
                grads.append(x.grad)
    for a, b in zip(grads[:12], grads[12:], strict=True):
        # What is passed on is a difference of terms of the size of the gradients that came in.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@pytest.mark.parametrize("path", PATHS)
def test_gradients_that_are_not_finite_do_not_stay(path):
    layer = StreamingNorm(3, warmup=0)
    with PATHS[path]():
        train(layer, [[1]] * 4)
        before = layer.grads.short.clone()
        layer(torch.randn(1, 3, requires_grad=True)).backward(torch.full((1, 3), float("nan")))
        assert torch.equal(layer.grads.short, before)
        assert all(torch.isfinite(value).all() for value in train(layer, [[1]] * 4))


def test_learning_from_one_sample_at_a_time_survives_a_long_memory():
    """Real digits, real SGD: taken literally the algorithm ends in values that are not finite, or far from any use."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    losses = {}
    for guard in (True, False):
        torch.manual_seed(0)
        blocks = [(nn.Linear(a, 64), StreamingNorm(64, alpha=(0.997, 0.003), guard=guard), nn.ReLU()) for a in (64, 64)]
        model = nn.Sequential(*[module for block in blocks for module in block], nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for i in range(500):
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[guard] = nn.functional.cross_entropy(model.eval()(x[500:]), y[500:]).item()
    assert losses[True] < 1
    assert not losses[False] < 2 * losses[True]


def test_states_without_a_count_of_the_window_load():
    """As versions 1 and 2 wrote them: the next window is the first that is counted."""
    source, layer = StreamingNorm(3), StreamingNorm(3)
    train(source, [[2], [2]])
    state = {name: value for name, value in source.state_dict().items() if not name.startswith("elements")}
    layer.load_state_dict(state)
    assert (int(layer.elements), int(layer.elements_before)) == (0, 0)
    assert torch.equal(layer.stats.long, source.stats.long)
    train(layer, [[2], [2]])
    assert int(layer.elements_before) == 2


def test_the_count_of_a_window_goes_on_after_loading():
    source, layer = StreamingNorm(3), StreamingNorm(3)
    train(source, [[2], [3]])
    source(torch.randn(4, 3))
    layer.load_state_dict(source.state_dict())
    assert (int(layer.elements), int(layer.elements_before)) == (4, 3)
    assert same(train(source, [[1, 1], [2]]), train(layer, [[1, 1], [2]]))


def test_decoupled_updates_fill_windows():
    """Eight batches of 32 are a full window: with DecoupledUpdate the default is the paper's rule."""
    results = []
    for guard in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), StreamingNorm(6, guard=guard), nn.Linear(6, 1))
        optimizer = DecoupledUpdate(torch.optim.SGD(model.parameters(), lr=0.1), 8)
        for _ in range(24):
            model(torch.randn(32, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_the_keyword():
    assert StreamingNorm(3).guard is True
    assert "guard=False" in repr(StreamingNorm(3, guard=False))
    assert convert(nn.Sequential(nn.BatchNorm1d(3)), guard=False, report=None)[0].guard is False
    with pytest.raises(ValueError, match="guard=32: must be True, or False"):
        StreamingNorm(3, guard=32)
