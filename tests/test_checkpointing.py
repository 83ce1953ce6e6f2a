"""torch.utils.checkpoint: a network that is run again in backward learns exactly what it learns without it."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import streamnorm
from streamnorm import GRU, GeneralBatchNorm, SampleNorm, StreamingNorm, TimeSpecificNorm, backends, kernels
from streamnorm.engine.compat import top_hooks as _top_hooks

again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def plainly(segment, *args):
    return segment(*args)


pytestmark = pytest.mark.skipif(_top_hooks is None, reason="this torch does not tell which segment it runs again")

NORMS = {
    "fused": StreamingNorm,
    "center mean": partial(StreamingNorm, center="mean", p=1),
    "plain": partial(StreamingNorm, p=3, warmup=0),
    "per sample": partial(StreamingNorm, ref="SP1", center="zero"),
    "located": partial(StreamingNorm, ref="BA6"),
    "window": partial(StreamingNorm, ref="SP4"),
    "batch": GeneralBatchNorm,
    "batch about the running mean": partial(GeneralBatchNorm, center="running", ref="BA4"),
    "in time": partial(TimeSpecificNorm, steps=2, center="running"),
    "sample": SampleNorm,
}


class Net(nn.Module):
    """Segments of a convolution, a norm, dropout and a second use of the first norm; run by `run`."""

    def __init__(self, norm, run, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        first = norm(4)
        self.norms = nn.ModuleList(first if shared or not i else norm(4) for i in range(3))
        self.shared = shared
        self.head = nn.Linear(4, 2)

    def segment(self, i, x):
        x = nn.functional.dropout(torch.relu(self.norms[i](self.convs[i](x), step=i)), 0.2)
        return self.norms[i](x, step=1) if self.shared else x

    def forward(self, x):
        x = self.stem(x)
        for i in range(3):
            x = self.run(partial(self.segment, i), x)
        return self.head(x.mean([2, 3]))


def trained(model, updates=4, batches=2, sizes=(2, 3)):
    """The state and the gradients after some updates, each of several batches."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = []
    for _ in range(updates):
        optimizer.zero_grad()
        for batch in range(batches):
            x, y = torch.randn(sizes[batch % 2], 3, 5, 5), torch.randint(2, (sizes[batch % 2],))
            nn.functional.cross_entropy(model(x), y).backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*model.state_dict().values(), *gradients]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_nothing_changes(norm, shared):
    expected = trained(Net(norm, plainly, shared))
    same(trained(Net(norm, again, shared)), expected)
    assert len(expected) > 20
    if not shared:
        same(trained(Net(norm, reentrant)), expected)


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (3, 7, 33), (8, 16, 9, 9), (5, 3), (1, 64, 16, 16)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"center": "mean"}, {"guard": False, "p": 1}], ids=str)
def test_a_repetition_is_the_first_run_to_the_bit(shape, settings):
    """In windows of several calls, when the warm start is over."""
    torch.manual_seed(0)
    norm, first, repeated = StreamingNorm(shape[1], **settings), [], []

    def segment(x):
        y = norm(x)
        (repeated if len(first) > len(repeated) else first).append(y.detach().clone())
        return y.square()  # saves y, so that backward needs it again

    for i in range(24):
        again(segment, torch.randn(shape, requires_grad=True)).sum().backward()
        if i % 3 == 2:
            norm.weights_updated()
    assert len(repeated) == 24
    same(repeated, first)


def test_nothing_changes_on_the_plain_path():
    with kernels.disabled():
        same(trained(Net(StreamingNorm, again, True)), trained(Net(StreamingNorm, plainly, True)))


@pytest.mark.parametrize("early_stop", [True, False])
def test_segments_in_segments(early_stop):
    class Nested(Net):
        def forward(self, x):
            def outer(x):
                return self.run(partial(self.segment, 1), self.run(partial(self.segment, 0), x))

            x = self.run(outer, self.stem(x))
            return self.head(self.run(partial(self.segment, 2), x).mean([2, 3]))

    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        same(trained(Nested(StreamingNorm, again, True)), trained(Nested(StreamingNorm, plainly, True)))


def test_two_losses_backward_in_any_order():
    def run(how):
        torch.manual_seed(0)
        norm, x = StreamingNorm(3), torch.randn(4, 3)
        first, second = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
        losses = [how(norm, first).pow(3).sum(), how(lambda v: norm(norm(v) + x.mean()), second).pow(3).sum()]
        losses[0].backward()
        losses[1].backward()
        return [first.grad, second.grad, *norm.state_dict().values()]

    same(run(again), run(plainly))


def test_a_retained_graph_is_repeated_and_pushes_again():
    def run(how):
        torch.manual_seed(0)
        norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
        loss = how(norm, x).pow(3).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *norm.state_dict().values()]

    same(run(again), run(plainly))
    same(run(reentrant), run(plainly))


@pytest.mark.parametrize("layer", [streamnorm.RNN, streamnorm.GRU, streamnorm.LSTM])
@pytest.mark.parametrize("norm", [StreamingNorm, partial(StreamingNorm, p=3), partial(TimeSpecificNorm, steps=3)])
def test_recurrent_layers(layer, norm):
    """In chunks of time, each a segment: the layer is shared by all of them."""

    def run(how):
        torch.manual_seed(0)
        model = layer(3, 4, norm=norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x, state, loss = torch.randn(6, 2, 3), None, 0.0
            for chunk in x.split(3):
                output, state = how(model, chunk, state)
                loss = loss + output.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return list(model.state_dict().values())

    same(run(again), run(plainly))


def test_reentrant_calls_of_one_layer_are_refused_unless_there_is_one_per_backward_pass():
    torch.manual_seed(0)
    norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
    loss = reentrant(norm, reentrant(norm, x)).sum()
    with pytest.raises(RuntimeError, match=r"called 2 times .* use_reentrant=False"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"called 2 times .* use_reentrant=False"):
        reentrant(lambda x: norm(norm(x)), x).sum().backward()
    with pytest.raises(RuntimeError, match=r"called 2 times .* use_reentrant=False"):
        (reentrant(norm, x).sum() + reentrant(norm, x).sum()).backward()
    loss = reentrant(norm, x).sum()  # given up
    del loss
    norm.eval()
    kept = reentrant(norm, x).sum()  # not counted: it took no statistics
    norm.train()
    reentrant(norm, x).sum().backward()
    assert norm.grads.count == 1
    assert kept.requires_grad


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner of two reentrant ones
def test_reentrant_segments_in_other_segments():
    """One call, in whichever way it is repeated."""
    norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
    for outer, inner in ((again, reentrant), (reentrant, again), (reentrant, reentrant)):
        norm.reset_running_stats()
        outer(lambda v, inner=inner: inner(norm, v * 1.0), x).sum().backward()
        assert norm.stats.count == norm.grads.count == 1


@pytest.mark.parametrize("how", [again, reentrant], ids=["again", "reentrant"])
@pytest.mark.parametrize("mode", ["eval", "paused"])
@pytest.mark.parametrize(
    "norm", [StreamingNorm, partial(StreamingNorm, p=3), GeneralBatchNorm], ids=["fused", "plain", "batch"]
)
def test_a_call_that_took_no_statistics_takes_none_when_repeated(norm, mode, how):
    """And it uses those of its first run, whatever was learned in between."""

    def run(how):
        torch.manual_seed(0)
        layer, x = norm(3), torch.randn(5, 3, requires_grad=True)
        layer(x).pow(2).sum().backward()
        if mode == "eval":
            layer.eval()
            loss = how(layer, x).pow(3).sum()
            layer.train()
        else:
            with streamnorm.paused(layer):
                loss = how(layer, x).pow(3).sum()
        layer(torch.randn(4, 3)).sum().backward()
        loss.backward()
        return [x.grad, *layer.state_dict().values()]

    same(run(how), run(plainly))


@pytest.mark.parametrize("layer", [streamnorm.RNN, streamnorm.GRU, partial(streamnorm.GRU, norm=GeneralBatchNorm)])
def test_recurrent_layers_are_repeated_in_the_mode_of_their_first_run(layer):
    def run(how):
        torch.manual_seed(0)
        model, x = layer(3, 4), torch.randn(5, 2, 3, requires_grad=True)
        loss = how(model, x)[0].pow(3).sum()
        for module in model.modules():
            if module is not model:
                module.eval()
        loss.backward()
        return [x.grad, *model.state_dict().values()]

    same(run(again), run(plainly))


def test_with_a_process_group_too():
    """Where folds are made in plain torch, and the rest by the kernels."""
    norm = partial(StreamingNorm, process_group="world")
    same(trained(Net(norm, again, True)), trained(Net(norm, plainly, True)))


@pytest.mark.parametrize("norm", [StreamingNorm, partial(StreamingNorm, p=3), partial(StreamingNorm, ref="BA6")])
def test_selective_checkpointing(norm):
    """The policy of torch counts operators: a repetition has the same ones as the first run."""
    keep = torch.utils.checkpoint.create_selective_checkpoint_contexts
    selective = partial(again, context_fn=partial(keep, [torch.ops.aten.convolution.default]))
    same(trained(Net(norm, selective)), trained(Net(norm, plainly)))


@pytest.mark.parametrize("make", [StreamingNorm, lambda size: GRU(size, size)], ids=["norm", "GRU"])
@pytest.mark.parametrize("backend", [None, "plain"])
def test_gradients_taken_within_a_segment_are_streamed_once(make, backend):
    def run(how):
        torch.manual_seed(0)
        layer, x = make(3), torch.randn(5, 3, requires_grad=True)

        def call(x):
            return layer(x.unsqueeze(1))[0].squeeze(1) if isinstance(layer, GRU) else layer(x)

        def segment(x):
            inner = x.detach().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(call(inner).pow(2).sum(), inner)
            return call(x + slope)

        with backends.use(backend) if backend else nullcontext():
            how(segment, x).pow(3).sum().backward()
        return [x.grad, *layer.state_dict().values()]

    same(run(again), run(plainly))


def test_a_segment_that_does_something_else_when_repeated_is_refused():
    first, second = StreamingNorm(3), StreamingNorm(3)
    x, runs = torch.randn(5, 3, requires_grad=True), []

    def segment(x):
        runs.append(1)
        return first(second(x)) if len(runs) == 1 else second(first(x))

    loss = again(segment, x).sum()
    with pytest.raises(RuntimeError, match="in another order when it is run again"):
        loss.backward()


def test_a_call_in_training_is_repeated_as_such_whatever_happened_in_between():
    def run(how):
        torch.manual_seed(0)
        norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
        loss = how(norm, x).pow(3).sum()
        norm(torch.randn(2, 3)).sum().backward()
        norm.weights_updated()
        norm(torch.randn(2, 3)).sum().backward()
        norm.eval()
        loss.backward()
        return [x.grad, *norm.state_dict().values()]

    same(run(again), run(plainly))


def test_the_states_are_kept_as_long_as_the_graph():
    from streamnorm.engine.replay import _segments

    norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
    before = len(_segments)
    loss = again(norm, x).sum()
    assert len(_segments) == before + 1
    loss.backward()
    del loss
    assert len(_segments) == before


def test_an_ordinary_forward_pass_within_backward_counts():
    """A hook that calls a layer is no repetition."""
    norm, other = StreamingNorm(3), torch.randn(5, 3)
    x = torch.randn(5, 3, requires_grad=True)
    x.register_hook(lambda grad: norm(other).detach() + grad)
    norm(x).sum().backward()
    assert norm.stats.count == 2


def test_other_hooks_on_saved_tensors_change_nothing():
    def run(how):
        torch.manual_seed(0)
        norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
        with how():
            loss = norm(x).pow(3).sum()
        loss.backward()
        return [x.grad, *norm.state_dict().values()]

    same(run(torch.autograd.graph.save_on_cpu), run(torch.enable_grad))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled streaming layers are tested from 2.13 on")
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_a_compiled_segment_is_repeated_exactly_and_a_compiled_checkpoint_refused():
    def run(how, compiler):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), StreamingNorm(4), nn.Tanh(), StreamingNorm(4, p=3), nn.Linear(4, 2))
        segment = compiler(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            how(segment, torch.randn(6, 3, requires_grad=True)).pow(2).sum().backward()
            optimizer.step()
        return list(model.state_dict().values())

    expected = run(plainly, torch.compile)
    same(run(again, torch.compile), expected)
    same(run(reentrant, torch.compile), expected)
    with pytest.raises(RuntimeError, match="compile inside the checkpoint"):
        run(torch.compile(again), nn.Identity())
