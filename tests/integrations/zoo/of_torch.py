"""Two models of plain torch, with which the checks themselves are tested."""

import torch
from integrations.examine import Model
from torch import nn


def vectors():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Images(nn.Module):
    """Batch, group and layer norms, arguments by name, and a branch that torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.grouped, self.layer, self.head = nn.GroupNorm(1, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, *, pixels):
        x = torch.relu(self.norm(self.conv(pixels)))
        x = self.grouped(x).mean((2, 3))
        return {"logits": self.head(self.layer(x if not torch.isinf(x).any() else x.clamp(-1, 1)))}


MODELS = [
    Model("torch", "vectors", vectors, lambda n: torch.randn(n, 6)),
    Model("torch", "images", Images, lambda n: {"pixels": torch.randn(n, 3, 6, 6)}),
]
