"""The streaming layer as a function, for people who keep the state themselves."""

from dataclasses import replace

import torch
from torch import Tensor

from . import backends
from .backends import H1, H2
from .core import state as states
from .core.algorithm import tested
from .core.config import Config
from .core.state import State
from .engine.context import check_memory, materialized, refuse_transforms
from .engine.function import Call, evaluate, stream
from .nn.base import mask_over_channels, to_channels_first

__all__ = ["Config", "State", "new_state", "streaming_norm", "weights_updated"]


def new_state(
    num_features: int,
    config: Config | None = None,
    space: tuple[int, ...] = (),
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype = torch.float32,
) -> State:
    """The state of a layer before training.

    Args:
        num_features: the number of channels.
        config: the settings; see `Config`.
        space: the spatial size of the input, for references with a location (BA3-6, SP3-5).
        device, dtype: of the statistics.

    Shape:
        - mean, sigma: of one statistic, such as `(C,)` for BA1 and `(C, *space)` for BA6.
        - long, short of the streams: `(2, *statistic)`, row 0 for the mean and row 1 for sigma.

    Example:
        >>> new_state(3).mean
        tensor([0., 0., 0.])
    """
    shape = (config or Config()).ref.statistic_shape(num_features, tuple(space))
    return states.new_state(shape, torch.empty(0, device=device, dtype=dtype))


def weights_updated(state: State) -> State:
    """The state after a weight update: the next training call folds H1, and its backward pass folds H2.

    Args:
        state: from the call before.

    Returns:
        The state for the next call. Its statistics and gradients are the tensors of `state`; both are marked.

    Example:
        >>> bool(weights_updated(new_state(3)).stats.pending)
        True
    """
    mark = torch.ones_like(state.stats.pending)
    stats, grads = replace(state.stats, pending=mark), replace(state.grads, pending=mark.clone())
    return replace(state, stats=stats, grads=grads)


def streaming_norm(
    x: Tensor,
    state: State,
    config: Config | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    step: int = 0,
    training: bool = True,
) -> tuple[Tensor, State]:
    """Streaming Normalization of a mini-batch: what `StreamingNorm` computes, and the state after it.

    y = weight * (x - mean) / sigma + bias, with the mean and sigma of s_hat = alpha1 * long + alpha2 * short of H1.

    Training: a pending weight update is folded into H1, s = S(x) is pushed, and s_hat is what H1 then blends to. The
    backward pass of y folds H2 and pushes g = dE/ds_hat; g_hat = beta1 * long + beta2 * short + beta3 * g flows on
    through S(x). Evaluation uses `state.eval_mean` and `state.eval_sigma`, or with eval_memory = 0 `state.mean` and
    `state.sigma`, and returns the state as it is.

    The state that is given keeps its statistics (H1). H2, `state.grads`, is one and the same in the state that is given
    and in the one that is returned: the backward pass of y writes into its tensors, after this function has returned.

    Args:
        x: the mini-batch.
        state: from `new_state`, or from the call before.
        config: the settings; see `Config`.
        weight: the gain, or None.
        bias: the bias, or None.
        mask: True where the activation is real; the output is 0 elsewhere.
        step: the timestep of a sequence; its samples count once, at step 0.
        training: whether statistics are streamed.

    Shape:
        - x: `(N, C, *space)`; the output has the same shape.
        - weight, bias: `(C,)`.
        - mask: broadcasts to `(N, *space)`.

    Returns:
        The output, of the shape of x, and the state for the next call.

    Example:
        >>> state = new_state(3)
        >>> for _ in range(2):
        ...     x = torch.randn(8, 3, requires_grad=True)
        ...     y, state = streaming_norm(x, state)
        ...     y.square().sum().backward()
        ...     state = weights_updated(state)
        >>> int(state.stats.count), int(state.grads.count)
        (1, 1)
    """
    config = config or Config()
    if training:
        refuse_transforms("streaming_norm")
    channels = weight.numel() if weight is not None else x.shape[1] if isinstance(x, Tensor) and x.ndim > 1 else 1
    x = to_channels_first(x, channels, 1)
    mask = None if mask is None else mask_over_channels(mask, x)
    check_memory(input=x, weight=weight, bias=bias, **states.to_dict(state))
    wanted = config.ref.statistic_shape(x.shape[1], tuple(x.shape[2:]))
    if tuple(state.mean.shape) != wanted:
        raise ValueError(
            f"state has statistics of shape {tuple(state.mean.shape)}, an input of shape {tuple(x.shape)} with "
            f"{config.ref} needs {wanted}: make it with new_state({x.shape[1]}, config, space={tuple(x.shape[2:])})"
        )
    if not training:
        shape = config.ref.kept_shape(x.shape)
        mean, sigma = tested(config, state)
        return evaluate(x, mean.reshape(shape), sigma.reshape(shape), weight, bias, mask), state
    x = materialized(x)
    after = replace(states.copied(state), grads=state.grads, loss_scale=state.loss_scale)
    call = backends.signature_of(config, x, weight, bias, mask, state.mean.dtype)
    plan = backends.choose(call, x, weight, bias, after)
    return stream(x, weight, bias, mask, Call(plan, H1(after), H2(state.grads), begins=step == 0)), after
