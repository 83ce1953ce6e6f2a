"""Norms of ours in torch's encoders, put there by hand: in evaluation they are called, not taken for layer norms."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from streamnorm import GeneralBatchNorm, SampleNorm, StreamingNorm

NORMS = {
    "streaming": lambda: StreamingNorm(8, channel_dim=-1),
    "batch": lambda: GeneralBatchNorm(8, channel_dim=-1),
    "sample": lambda: SampleNorm(8, ref="SP5", channel_dim=-1, p=1),
}
X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1
PADDING = torch.arange(5) >= torch.tensor([5, 3, 4, 5])[:, None]


def encoder_layer(**settings):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, **settings)


def trained(model):
    for _ in range(3):
        model(X)
    return model.eval()


def assert_calls_its_norms(model, **masks):
    """Gradients are wanted in the first call, so torch takes no fast path there in any case."""
    slow = model(X, **masks)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.allclose(model(X, **masks), slow, atol=1e-6)


def by_attribute(layer, name, norm):
    setattr(layer, name, norm)


def by_registering(layer, name, norm):
    delattr(layer, name)
    layer.register_module(name, norm)


def by_name(layer, name, norm):
    delattr(layer, name)
    layer.add_module(name, norm)


@pytest.mark.parametrize("put", [by_attribute, by_registering, by_name])
@pytest.mark.parametrize("names", [("norm1", "norm2"), ("norm1",), ("norm2",)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "activation": "gelu"}])
def test_a_layer_calls_the_norms_that_were_put_in(put, names, norm, settings):
    layer = encoder_layer(**settings)
    for name in names:
        put(layer, name, NORMS[norm]())
    assert_calls_its_norms(trained(layer))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_so_does_a_copy(copied):
    layer = encoder_layer()
    layer.norm1 = StreamingNorm(8, channel_dim=-1)
    assert_calls_its_norms(copied(trained(layer)))
    assert_calls_its_norms(trained(copied(layer)))


@pytest.mark.filterwarnings("ignore")  # what the compiler says about itself
def test_a_norm_that_was_compiled_by_itself():
    layer = encoder_layer()
    layer.norm1 = torch.compile(StreamingNorm(8, channel_dim=-1), backend="eager")
    assert_calls_its_norms(trained(layer))


def test_a_subclass_that_makes_its_norms_itself():
    class Layer(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(8, 2, 16, 0.0, batch_first=True)
            self.norm1, self.norm2 = (StreamingNorm(8, channel_dim=-1) for _ in range(2))

    assert_calls_its_norms(trained(Layer()))


def test_a_norm_from_another_process():
    """Nothing was made in the process that unpickles it."""
    code = """
import pickle, sys, torch
from torch import nn
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
layer.norm1 = pickle.loads(sys.stdin.buffer.read())
layer.eval()
x = torch.randn(4, 5, 8)
slow = layer(x)
with torch.no_grad():
    print(torch.allclose(layer(x), slow, atol=1e-6))
"""
    norm = StreamingNorm(8, channel_dim=-1)
    norm(X)
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(norm), capture_output=True, check=False)
    assert done.stdout.split() == [b"True"], done.stderr.decode()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch says that it falls back
def test_an_encoder_built_from_such_a_layer():
    layer = encoder_layer()
    layer.norm2 = StreamingNorm(8, channel_dim=-1)
    stack = trained(nn.TransformerEncoder(layer, 2))
    assert_calls_its_norms(stack)
    assert_calls_its_norms(stack, src_key_padding_mask=PADDING)
    assert_calls_its_norms(copy.deepcopy(stack), src_key_padding_mask=PADDING)


def test_an_encoder_whose_layers_are_set_later():
    stack, layer = nn.TransformerEncoder(encoder_layer(), 1), encoder_layer()
    layer.norm1 = StreamingNorm(8, channel_dim=-1)
    stack.layers = nn.ModuleList([encoder_layer(), layer])
    assert_calls_its_norms(trained(stack), src_key_padding_mask=PADDING)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", ["streaming", "batch", "sample"])
def test_an_encoder_whose_layers_get_norms_later(norm):
    """The encoder cannot know: without padding it is right, with padding it makes nested tensors, which are refused."""
    stack = nn.TransformerEncoder(encoder_layer(), 2)
    stack.layers[1].norm1 = NORMS[norm]()
    assert_calls_its_norms(trained(stack))
    before = copy.deepcopy(stack.state_dict())
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=r"(?i)nested"):
        stack(X, src_key_padding_mask=PADDING)
    assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())
    stack.use_nested_tensor = False
    assert_calls_its_norms(stack, src_key_padding_mask=PADDING)


def test_nested_tensors_are_refused_with_a_way_out():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([X[0], X[1, :3]])
    with pytest.raises(TypeError, match=r"nested.*mask.*encoder.use_nested_tensor = False"):
        SampleNorm(8, channel_dim=-1)(nested)


def test_decoders_have_no_such_path():
    decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
    for name in ("norm1", "norm2", "norm3"):
        setattr(decoder, name, StreamingNorm(8, channel_dim=-1))
    for _ in range(3):
        decoder(X, X)
    slow = decoder.eval()(X, X)
    with torch.no_grad():
        assert torch.allclose(decoder(X, X), slow, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_encoders_keep_their_fast_path():
    """A norm of ours elsewhere in the process, or behind the layers, is no reason to leave it."""
    norm = StreamingNorm(8, channel_dim=-1)
    stack = nn.TransformerEncoder(encoder_layer(), 1, norm=norm)
    assert stack.use_nested_tensor
    assert stack.layers[0].activation_relu_or_gelu == 1
    slow = trained(stack)(X, src_key_padding_mask=PADDING)
    with torch.no_grad():  # where padded positions are zero
        assert torch.allclose(stack(X, src_key_padding_mask=PADDING)[~PADDING], slow[~PADDING], atol=1e-6)
