"""Models in evaluation mode leave torch: torch.export, torch.jit.trace, and ONNX, run by onnxruntime."""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from streamnorm import GRU, LSTM, RNN, ConvRNN, GeneralBatchNorm, NormRef, SampleNorm, StreamingNorm, TimeSpecificNorm

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
    page = (Path(__file__).parent.parent / "docs/export.md").read_text()
    (block,) = re.findall(r"```python onnx\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "export.md", "exec"), {})
