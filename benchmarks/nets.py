"""Networks of the benchmark: a small residual network, and recurrent loops in plain torch."""

import torch
from torch import nn


class NetB(nn.Module):
    """A small residual network for CIFAR's size: two blocks with a transition between them."""

    def __init__(self, norm, width=64):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first, self.second = self.block(norm, width), self.block(norm, width)
        down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.transition = nn.Sequential(norm(width), nn.ReLU(), down)
        self.head = nn.Sequential(norm(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    @staticmethod
    def block(norm, width):
        half = [(norm(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        return nn.Sequential(*half[0], *half[1])

    def forward(self, x):
        h = self.stem(x)
        h = self.transition(h + self.first(h))
        return self.head(h + self.second(h))


class LayerNormRNN(nn.Module):
    """h_t = tanh(LN(W_x x_t) + LN(W_h h_{t-1})), with one product for the whole input.

    `ahead`: the input's side is normalized before the loop too, which a layer norm allows since it looks at one row.
    """

    def __init__(self, size, hidden, ahead=False):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(size, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.ahead = ahead

    def forward(self, x):
        h, outputs = x.new_zeros(x.shape[1], self.of_h.out_features), []
        for product in normalized([self.norm_x], [self.of_x(x)], self.ahead):
            h = torch.tanh(product[0] + self.norm_h(self.of_h(h)))
            outputs.append(h)
        return torch.stack(outputs)


class LayerNormGRU(nn.Module):
    """The equations of `streamnorm.GRU` with layer norms."""

    def __init__(self, size, hidden, ahead=False):
        super().__init__()
        self.of_x = nn.Linear(size, 3 * hidden, bias=False)
        self.gates, self.new = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.norms_x, self.norms_h = (nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3)) for _ in range(2))
        self.ahead = ahead

    def forward(self, x):
        norm_r, norm_z, norm_new = self.norms_h
        h, outputs = x.new_zeros(x.shape[1], self.new.out_features), []
        for of_r, of_z, of_new in normalized(self.norms_x, self.of_x(x).chunk(3, -1), self.ahead):
            h_r, h_z = self.gates(h).chunk(2, -1)
            r, z = torch.sigmoid(of_r + norm_r(h_r)), torch.sigmoid(of_z + norm_z(h_z))
            h = z * torch.tanh(of_new + norm_new(self.new(h * r))) + (1 - z) * h
            outputs.append(h)
        return torch.stack(outputs)


class LayerNormLSTM(nn.Module):
    """The equations of `streamnorm.LSTM` with layer norms."""

    def __init__(self, size, hidden, ahead=False):
        super().__init__()
        self.of_x, self.of_h = nn.Linear(size, 4 * hidden, bias=False), nn.Linear(hidden, 4 * hidden, bias=False)
        self.norms_x, self.norms_h = (nn.ModuleList(nn.LayerNorm(hidden) for _ in range(4)) for _ in range(2))
        self.ahead = ahead

    def forward(self, x):
        h, outputs = x.new_zeros(x.shape[1], self.of_h.in_features), []
        c = h
        for of_x in normalized(self.norms_x, self.of_x(x).chunk(4, -1), self.ahead):
            of_h = (norm(product) for norm, product in zip(self.norms_h, self.of_h(h).chunk(4, -1), strict=True))
            i, f, g, o = (a + b for a, b in zip(of_x, of_h, strict=True))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs)


class GroupNormOfSteps(nn.GroupNorm):
    """A group norm as recurrent layers of streamnorm call it."""

    def __init__(self, channels, **factory):
        super().__init__(8, channels, **factory)

    def forward(self, x, mask=None, step=0):
        return super().forward(x)


def normalized(norms, gates, ahead):
    """The normalized products of the input, timestep by timestep, a list with one for each gate."""
    if ahead:
        gates = [norm(gate) for norm, gate in zip(norms, gates, strict=True)]
    for products in zip(*(gate.unbind() for gate in gates), strict=True):
        yield products if ahead else [norm(product) for norm, product in zip(norms, products, strict=True)]
