"""Layer, group and batch normalization by torch's own operators, differentiable once.

`dispatch` says when they apply, the plain path what they compute. Each gives the output, and the mean and 1 / sigma of
every statistic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .fused import refuse_second_derivative

Results = tuple[Tensor, Tensor, Tensor]
Operator = Callable[[Tensor, Tensor | None, Tensor | None, float], Results]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    """SP1 of `(N, C)`."""
    return _once(torch.native_layer_norm(x, x.shape[1:], weight, bias, eps))


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    """SP1 of `(N, C, *space)`, contiguous."""
    n, c = x.shape[:2]
    return _once(torch.native_group_norm(x, weight, bias, n, c, x.numel() // (n * c), 1, eps))


def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    """SP2 of `(N, C, *space)`, contiguous."""
    n, c = x.shape[:2]
    return _once(torch.native_group_norm(x, weight, bias, n, c, x.numel() // (n * c), c, eps))


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    """BA1. What is not contiguous is read as rows `(M, C)`: no copy where channels are last in memory."""
    if x.ndim == 2 or x.is_contiguous():
        return _once(torch.native_batch_norm(x.contiguous(), weight, bias, None, None, True, 0.0, eps))
    last = x.movedim(1, -1)
    y, mean, inverse = batch_norm(last.reshape(-1, x.shape[1]), weight, bias, eps)
    return y.view(last.shape).movedim(-1, 1), mean, inverse


def _once(results: Results) -> Results:
    """Refuse the second derivative, which the plain path does not have in training either."""
    node = results[0].grad_fn
    if node is not None:
        node.register_prehook(_refuse)
    return results


def _refuse(gradients: tuple[Tensor, ...]) -> None:
    refuse_second_derivative()
