"""PyTorch Geometric: graph networks with its norms; a sample is a graph of five nodes."""

import torch
from integrations.examine import Model
from torch_geometric import nn as gnn


def graphs(n):
    edges = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    return torch.randn(5 * n, 6), torch.cat([edges + 5 * i for i in range(n)], 1)


def model(kind, norm, **settings):
    def build():
        return getattr(gnn, kind)(6, 8, num_layers=3, out_channels=3, norm=norm, **settings)

    return Model("torch_geometric", f"{kind}, {norm}", build, graphs)


MODELS = [
    model("GCN", "BatchNorm"),
    model("GraphSAGE", "LayerNorm"),
    model("GIN", "BatchNorm"),
    model("GAT", "GraphNorm"),
    model("GCN", "PairNorm"),
    model("GCN", "InstanceNorm"),
]
