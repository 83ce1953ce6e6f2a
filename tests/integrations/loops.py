"""What every trainer is held against: the same model, the same batches, and a loop in plain torch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from streamnorm import StreamingNorm

FEATURES, CLASSES, BATCH = 6, 3, 4


def new_model():
    """A classifier with two streaming layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), StreamingNorm(16), nn.ReLU(), nn.Linear(16, 8), StreamingNorm(8), nn.Linear(8, CLASSES)
    )


def loader(batches, size=BATCH):
    torch.manual_seed(1)
    x, y = torch.randn(batches * size, FEATURES), torch.randint(CLASSES, (batches * size,))
    return DataLoader(TensorDataset(x, y), batch_size=size)


def new_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_loop(model, batches, window, epochs=1, precision=None, divide_by=None):
    """Gradient accumulation by hand; the last window of an epoch may be short. Returns the number of updates.

    `divide_by(n)`: what the losses of a window of n batches are divided by.
    """
    optimizer, updates = new_optimizer(model), 0
    divide_by = divide_by or (lambda n: window)
    for _ in range(epochs):
        data = list(batches)
        for start in range(0, len(data), window):
            here = data[start : start + window]
            for x, y in here:
                with torch.autocast("cpu", precision, enabled=precision is not None):
                    loss = nn.functional.cross_entropy(model(x), y)
                (loss / divide_by(len(here))).backward()
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return updates


def norms(model):
    return [module for module in model.modules() if isinstance(module, StreamingNorm)]


class Calls:
    """`count` of every streaming layer after each training call: it begins again at 1 when the layer has folded."""

    def __init__(self, model):
        self.counts = [[] for _ in norms(model)]
        for norm, counts in zip(norms(model), self.counts, strict=True):
            norm.register_forward_hook(lambda norm, x, y, counts=counts: self.look(norm, counts))

    def look(self, norm, counts):
        if norm.training:
            counts.append(int(norm.state.stats.count))

    def assert_windows(self, *sizes):
        """The training calls came in windows of these sizes, between which every layer folded once."""
        for counts in self.counts:
            assert counts == [i for size in sizes for i in range(1, size + 1)]


def assert_equal(model, other):
    """Weights and every part of the streaming state, bit for bit."""
    one, two = model.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def assert_heard(model, updates):
    """The last update is waiting to be folded into both streams of every layer, and every one before it was."""
    for norm in norms(model):
        assert norm.stats.pending
        assert norm.grads.pending
        assert bool(norm.stats.empty) == (updates == 1)
