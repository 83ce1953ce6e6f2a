"""Models in evaluation mode leave torch: torch.export, torch.jit.trace, and ONNX, run by onnxruntime."""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from streamnorm import (
    GRU,
    LSTM,
    RNN,
    Affine,
    ConvRNN,
    GeneralBatchNorm,
    NormRef,
    RNNCell,
    SampleNorm,
    StreamingNorm,
    TimeSpecificNorm,
    fuse,
    to_batchnorm,
)
from streamnorm.convert.deploy import FixedAffine

OLD = torch.__version__ < "2.7"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters, about themselves


class ConvNet(nn.Module):
    def __init__(self, norm=StreamingNorm):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 4, 3), norm(4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class AllNorms(nn.Module):
    """Every norm, with several references and p, on the same images: exporters take their time, so all go at once."""

    def __init__(self):
        super().__init__()
        streaming = [StreamingNorm(3, ref=ref, p=p) for ref, p in (("BA1", 2), ("BA2", 1), ("BA6", 3))]
        batch = [GeneralBatchNorm(3), GeneralBatchNorm(3, ref="BA5", p=3), TimeSpecificNorm(3, steps=2)]
        window = NormRef(samples=False, channels="each", space=3)
        sample = [SampleNorm(3, ref=ref, p=p) for ref, p in (("SP1", 2), ("SP2", 1), (window, 2))]
        bare = StreamingNorm(3, affine=False, center="zero")
        self.norms = nn.ModuleList([*streaming, *batch, *sample, bare])
        self.last = StreamingNorm(3, channel_dim=-1)

    def forward(self, x):
        return torch.stack([*(norm(x) for norm in self.norms), self.last(x.movedim(1, -1)).movedim(-1, 1)])


class Recurrent(nn.Module):
    """An RNN and a GRU, over sequences of fixed length."""

    def __init__(self):
        super().__init__()
        self.rnn, self.gru = RNN(3, 4, batch_first=True), GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.gru(self.rnn(x)[0])


def images(n):
    return torch.randn(n, 3, 6, 6)


def sequences(n):
    return torch.randn(n, 2, 3)


MODELS = {"norms": (AllNorms, images), "conv-net": (ConvNet, images), "recurrent": (Recurrent, sequences)}
MORE = {
    "gru": (lambda: GRU(3, 4, num_layers=2, norm=SampleNorm, batch_first=True), sequences),
    "lstm": (lambda: LSTM(3, 4, bidirectional=True, batch_first=True), sequences),
    "conv-rnn": (lambda: ConvRNN(3, 4), lambda n: torch.randn(n, 2, 3, 4, 4)),
}


def trained(name):
    """A model that has been trained for a few steps, in evaluation mode, and what makes its input."""
    make, data = (MODELS | MORE)[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        first(model(data(6) * 2 + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), data


def first(output):
    return output[0] if isinstance(output, tuple) else output


def close(a, b):
    torch.testing.assert_close(first(a), first(b), rtol=1e-5, atol=1e-5)


def train_on(model, data):
    """It goes on training after whatever was done to it."""
    model.train()
    y = first(model((data(6) * 3 - 1).requires_grad_()))
    y.square().mean().backward()
    assert type(y.detach()) is torch.Tensor
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def exported(model, x, strict=False):
    shapes = ({0: torch.export.Dim("n", min=2, max=64)},)
    return torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)


def check_export(name, strict):
    model, data = trained(name)
    before = copy.deepcopy(model.state_dict())
    program = exported(model, data(6), strict)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    x = data(9)
    y = first(model(x)).detach().clone()
    close(program.module()(x), y)
    close(loaded.module()(x), y)
    train_on(model, data)
    close(loaded.module()(x), y)  # what was saved stays as it was


@pytest.mark.parametrize("name", MODELS)
def test_torch_export(name):
    check_export(name, strict=False)


@pytest.mark.skipif(OLD, reason="its compiler does not follow what windows and recurrent layers do")
def test_torch_export_strict():
    check_export("conv-net", strict=True)


@pytest.mark.parametrize("name", MODELS)
def test_training_mode_is_refused(name):
    model, data = trained(name)
    model.train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"is in training mode.*call model\.eval\(\)"):
        exported(model, data(6))
    with pytest.raises(RuntimeError, match=r"is in training mode.*call model\.eval\(\)"):
        torch.jit.trace(model, (data(6),))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    train_on(model, data)


@pytest.mark.skipif(OLD, reason="there torch cannot tell a strict export from a compilation")
def test_training_mode_is_refused_by_a_strict_export():
    model, data = trained("conv-net")
    with pytest.raises(Exception, match=r"is in training mode.*call model\.eval\(\)"):
        exported(model.train(), data(6), strict=True)
    train_on(model, data)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.skipif(OLD, reason="as above"))])
def test_a_failed_export_leaves_nothing_behind(strict):
    class Breaks(ConvNet):
        def forward(self, x):
            y = super().forward(x)
            if y.sum() > 0:  # a decision that depends on the data
                return y
            return -y

    model = Breaks()
    model(images(4))
    model.eval()
    with pytest.raises(Exception, match=r".*"):
        exported(model, images(6), strict)
    model(images(3))
    train_on(model, images)


def test_statistics_in_a_program_are_its_own():
    """torch shares weights and buffers with the program until it is saved; statistics of streams are copied."""
    layer = StreamingNorm(3)
    layer(images(4))
    program = exported(layer.eval(), images(4))
    x = images(5)
    y = program.module()(x)
    train_on(layer, images)
    assert not torch.equal(layer.eval()(x), y)
    assert torch.equal(program.module()(x), y)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("name", MODELS | MORE)
def test_jit_trace(name, recording):
    """torch compares the trace with the model by itself; without grad the kernels would serve an ordinary call."""
    model, data = trained(name)
    with torch.set_grad_enabled(recording):
        traced = torch.jit.trace(model, (data(6),))
    x = data(6)
    y = first(model(x)).detach().clone()
    close(traced(x), y)
    train_on(model, data)


@pytest.fixture(scope="module")
def runtime():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def run_onnx(runtime, model, x, others, **options):
    """Export, then run the batches `others` in onnxruntime."""
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, **options)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return [torch.from_numpy(session.run(None, {name: other.numpy()})[0]) for other in others]


@pytest.mark.skipif(OLD, reason="its exporter needs an older onnxscript")
@pytest.mark.parametrize("name", MODELS)
def test_onnx(runtime, name):
    model, data = trained(name)
    x, others = data(6), [data(6), data(9)]
    wanted = [first(model(other)).detach() for other in others]
    shapes = ({0: torch.export.Dim("n", min=2, max=64)},)
    for got, y in zip(run_onnx(runtime, model, x, others, dynamic_shapes=shapes), wanted, strict=True):
        torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-5)
    train_on(model, data)


@pytest.mark.skipif(OLD, reason="its exporter needs an older onnxscript")
def test_onnx_in_training_mode_is_refused(runtime):
    model, data = trained("conv-net")
    with pytest.raises(Exception, match=r".*") as refused:
        torch.onnx.export(model.train(), (data(6),), dynamo=True, verbose=False)
    chain, texts = refused.value, []
    while chain is not None:
        texts.append(str(chain))
        chain = chain.__cause__ or chain.__context__
    assert "call model.eval()" in "\n".join(texts)
    train_on(model, data)


@pytest.mark.skipif(OLD, reason="its exporter needs an older onnxscript")
def test_the_example_of_the_docs(runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs/guide/export.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python onnx\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "export.md", "exec"), {})


# torch.fx and torch.jit.script


class Around(nn.Module):
    """Modules of ours among operations of torch, with a mask and without."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.gain = nn.Conv1d(3, 4, 1), norm, Affine(4)

    def forward(self, x, mask=None):
        h = self.first(x).relu()
        return self.gain(self.norm(h, mask=mask)) + h


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.cell, self.conv = GRU(3, 4), RNNCell(4, 4), ConvRNN(3, 2)

    def forward(self, x):
        output, last = self.gru(x)
        return self.cell(output[0], last[0]), self.conv(x[..., None, None])[0]


class OnlyTorch(torch.fx.Tracer):
    """As those that take features out of a model have it: all that is torch's is a leaf, sequences too."""

    def is_leaf_module(self, m, module_qualified_name):
        return m.__module__.startswith("torch.nn")


NORMS = {
    "streaming": lambda: StreamingNorm(4),
    "last": lambda: Swapped(StreamingNorm(4, channel_dim=-1)),
    "located": lambda: StreamingNorm(4, ref="BA6"),
    "batch": lambda: GeneralBatchNorm(4),
    "steps": lambda: TimeSpecificNorm(4, steps=2),
    "sample": lambda: SampleNorm(4),
    "fixed": lambda: FixedAffine(torch.rand(2, 4), torch.rand(2, 4)),
}


class Swapped(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, mask=None):
        return self.norm(x.transpose(1, 2), mask).transpose(1, 2)


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, OnlyTorch])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_node_for_fx(name, tracer):
    model = Around(NORMS[name]())
    x, mask = torch.randn(5, 3, 6), torch.rand(5, 6) > 0.3
    model(x)
    graph = tracer().trace(model, {"mask": None})
    traced = torch.fx.GraphModule(model, graph)
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    assert called == ["first", "norm.norm" if name == "last" else "norm", "gain"]
    close(traced.eval()(x), model.eval()(x))
    close(torch.fx.GraphModule(model, tracer().trace(model))(x, mask), model(x, mask))
    if name == "streaming":  # it goes on learning
        traced.train()(x).sum().backward()
        assert int(traced.norm.stats.count) == 2


def test_recurrent_layers_are_one_node_for_fx():
    model = Unpacks()
    x = torch.randn(4, 5, 3)
    model(x)
    traced = torch.fx.symbolic_trace(model.eval())
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["gru", "cell", "conv"]
    for ours, theirs in zip(traced(x), model(x), strict=True):
        close(ours, theirs)


def test_fx_is_told_what_it_cannot_look_into():
    class Doubled(StreamingNorm):
        def forward(self, x, mask=None, step=0):
            return 2 * super().forward(x, mask, step)

    with pytest.raises(TypeError, match=r"Doubled has a forward of its own.*is_leaf_module"):
        torch.fx.symbolic_trace(nn.Sequential(Doubled(4)))
    with pytest.raises(TypeError, match="trace a model that holds it"):
        torch.fx.symbolic_trace(StreamingNorm(4))


@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("space", [(), (6,)])
def test_constants_are_scripted_and_traced(channel_dim, space):
    layer = FixedAffine(torch.rand(2, 4, *space), torch.rand(2, 4, *space), channel_dim=channel_dim)
    x, mask = torch.randn(5, 4, 6), torch.rand(5, 6) > 0.3
    x = x if channel_dim == 1 else x.movedim(1, -1)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(layer), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    for arguments in ((x,), (x, mask), (x, None, 1), (x, mask, 7), (x.half(),), (x.double(),)):
        y = layer(*arguments)
        assert scripted(*arguments).dtype == y.dtype
        close(scripted(*arguments), y)
    close(torch.jit.trace(layer, (x,))(x[:3]), layer(x[:3]))
    close(torch.jit.script(torch.fx.symbolic_trace(nn.Sequential(layer)))(x), layer(x))
    if space:
        with pytest.raises(torch.jit.Error, match="spatial size"):
            scripted(torch.randn(5, 4, 1) if channel_dim == 1 else torch.randn(5, 1, 4))


def test_a_deployed_model_is_scripted():
    layers = nn.Conv2d(3, 4, 3), StreamingNorm(4, ref="BA6"), nn.ReLU(), nn.Conv2d(4, 2, 1), StreamingNorm(2)
    model = nn.Sequential(*layers)
    x = torch.randn(4, 3, 6, 6)
    model(x)
    for new in (to_batchnorm(model.eval(), report=None), fuse(model, example=x, report=None)):
        close(torch.jit.script(new)(x), model(x))
        close(torch.jit.trace(new, (x,))(x), model(x))
        close(torch.fx.symbolic_trace(new)(x), model(x))
