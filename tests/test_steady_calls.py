"""A steady call is short: the Python functions that it enters are counted, where small inputs would feel them."""

import sys
from pathlib import Path

import pytest
import torch

import streamnorm
from streamnorm import StreamingNorm, backends

SOURCE = str(Path(streamnorm.__file__).parent)
SHAPES = [(1, 512), (1, 64, 32, 32)]
FORWARD = 17  # Python calls from `layer(x)` on, torch's own among them
BACKWARD = 5  # Python calls in our files


class Counted:
    """The Python functions that are entered within the context, as (file, name), in this thread.

    Autograd runs the backward pass of tensors on the CPU in the thread that asked for it.
    """

    def __enter__(self):
        self.calls = []
        sys.setprofile(self._seen)
        return self

    def _seen(self, frame, event, _):
        if event == "call":
            self.calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    def __exit__(self, *_):
        sys.setprofile(None)
        self.calls.pop()  # of this function

    @property
    def ours(self):
        return [name for file, name in self.calls if file.startswith(SOURCE)]


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_steady_call_enters_few_functions(shape, affine):
    """Right after a weight update, and in the middle of a window."""
    layer = StreamingNorm(shape[1], affine=affine)
    x, dy = torch.randn(shape, requires_grad=True), torch.ones(shape)
    if backends.explain(layer, x).startswith("plain"):
        pytest.skip("there are no kernels here, and plain torch enters more functions")
    optimizer = torch.optim.SGD([x, *layer.parameters()], 0.01)
    for _ in range(4):
        layer(x).backward(dy)
        optimizer.step()
    for _ in range(2):
        with Counted() as forward:
            y = layer(x)
        with Counted() as backward:
            y.backward(dy)
        assert forward.calls[0][1] == "_wrapped_call_impl"
        assert "forward" in forward.ours
        assert "backward" in backward.ours
        assert len(forward.calls) <= FORWARD, forward.calls
        assert len(backward.ours) <= BACKWARD, backward.ours
