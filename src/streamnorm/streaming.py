"""Streaming Normalization: the layer of the paper, F and G around S and N."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import stream
from .base import (
    BATCHNORM_KEYS,
    Device,
    Norm,
    batchnorm_statistics,
    is_batchnorm,
    is_number,
    moved,
    numbers,
    outside_inference_mode,
    statistics_like,
)
from .compiled import stream_compiled
from .dispatch import apply, compute_dtype, evaluate, fused_layout, fused_settings, fuses_compiled
from .fused import stream_layer
from .normref import NormRef
from .rules import Call, Rules, folded, stream_gradients, stream_statistics
from .stream import State, Stream
from .updates import Listener, loss_scale


class StreamingNorm(Norm, Listener):
    """Streaming Normalization: statistics of everything seen so far, for any batch size, one included.

    Training: fold if the weights were updated since the last call; s = S(x) is pushed into H1; s_hat = alpha1 * long
    + alpha2 * short; y = weight * (x - mean) / sigma + bias with s_hat. Backward: g = dE/ds_hat is pushed into H2;
    beta1 * long + beta2 * short + beta3 * g flows on through S(x) instead of g. Evaluation uses the latest s_hat and
    changes nothing. `short` averages exactly since the last weight update, `long` is the exponential average of those
    averages with `kappa` (by default alpha, for statistics and gradients alike).

    `ref` is a code of the paper (BA1-6, SP1-5) or a NormRef, `p` the order of the moment. `center`: c of sigma =
    (average |x - c|^p + eps^(p/2))^(1/p) is the "running" mean (setting B), the "mean" of the reference (A), or "zero"
    (C). For the first `warmup` elements per statistic the layer turns gradually from a layer norm into a streaming
    norm; 0 switches that off. A mini-batch with values that are not finite is not pushed.

    Optimizers of torch tell the layer of weight updates by themselves; see `streamnorm.attach` for the exceptions.
    Shapes and `mask` as in `SampleNorm`. State: `mean`, `sigma` (the latest s_hat), `stats` (H1), `grads` (H2).

    >>> norm = StreamingNorm(3)
    >>> y = norm(torch.randn(1, 3))  # one sample
    >>> norm.stats.long.shape, int(norm.stats.count)
    (torch.Size([2, 3]), 1)
    """

    _version = 1
    _state: State
    _marked = False  # a weight update may be pending; spares calls that cannot have one the work of a fold
    _shared = False  # somebody may hold the tensors of the state: they are not written to any more

    def __init__(
        self,
        num_features: int,
        *,
        ref: str | NormRef = "BA1",
        p: float = 2.0,
        center: str = "running",
        alpha: Sequence[float] = (0.7, 0.3),
        beta: Sequence[float] = (0.7, 0.3, 0.0),
        kappa: Sequence[float] | None = None,
        warmup: float = 256,
        eps: float = 1e-5,
        affine: bool = True,
        channel_dim: int = 1,
        process_group: object = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            ref=ref,
            p=p,
            center=center,
            eps=eps,
            affine=affine,
            channel_dim=channel_dim,
            device=device,
            dtype=dtype,
        )
        if not (is_number(warmup) and warmup >= 0):
            raise ValueError(f"warmup={warmup!r}: must be a finite number of at least 0 (elements per statistic)")
        if process_group is not None:
            raise ValueError(f"process_group={process_group!r}: merging statistics over processes is not there yet")
        self.alpha = numbers("alpha", alpha, "long short")
        self.beta = numbers("beta", beta, "long short present")
        self.kappa = numbers(
            "kappa", self.alpha * 2 if kappa is None else kappa, "long-stats short-stats long-grads short-grads"
        )
        self.warmup = warmup
        self.process_group = process_group
        self._state = stream.new_state(self.initial_shape(), statistics_like(device, dtype))

    @property
    def collects(self) -> bool:
        return self.training and not self._paused

    @property
    def stored(self) -> Tensor:
        return self._state.mean

    @property
    def mean(self) -> Tensor:
        return self._handed_out().mean

    @property
    def sigma(self) -> Tensor:
        return self._handed_out().sigma

    @property
    def stats(self) -> Stream:
        """H1: the streams of mean (row 0) and sigma (row 1)."""
        return self._handed_out().stats

    @property
    def grads(self) -> Stream:
        """H2: the streams of dE/dmean and dE/dsigma."""
        self._settled()
        return self._handed_out().grads

    def _handed_out(self) -> State:
        """The state for somebody to keep: what was read never changes under the reader's hands."""
        self._shared = True
        return self._state

    def _own(self) -> State:
        """The state for writing into."""
        if self._shared:
            with outside_inference_mode():
                self._state = stream.copied(self._state)
            self._shared = False
        return self._state

    def reset_running_stats(self) -> None:
        """Forget everything: statistics, their gradients, and the spatial size that they are bound to."""
        self._state = stream.new_state(self.initial_shape(), self._state.seen)

    def reset_gradients(self) -> None:
        """Forget the streamed gradients, for a new loss or a new scale of it."""
        shape, like = tuple(self._state.mean.shape), self._state.seen
        self._state = replace(self._state, grads=stream.new_stream(shape, like), loss_scale=torch.zeros_like(like))

    def forward(self, x: Tensor, mask: Tensor | None = None, step: int = 0) -> Tensor:
        x, mask = self.enter(x, mask)
        if not self.collects:
            state = self._state if torch.compiler.is_compiling() else self._handed_out()
            mean, sigma = self.view(state.mean, state.sigma, x)
            return self.leave(evaluate(x, mean, sigma, self.weight, self.bias, mask))

        if torch.compiler.is_compiling():
            return self.leave(self._compiled(x, mask))
        layout, settings = fused_layout(x, mask), self.fused_settings()
        if layout and settings:
            y = stream_layer(x, self.weight, self.bias, layout, settings, self.begin_call(), self.receive)
            return self.leave(y)
        self._forward_runs()
        rules = self.rules
        with outside_inference_mode(), torch.no_grad():
            before = stream.bind(self._settled(), self.statistic_shape(x))
            before = folded(rules, before) if self._marked else before
            after, call = stream_statistics(rules, before, x.to(compute_dtype(x, before.mean)), mask)
        y = apply(
            x, self.weight, self.bias, mask, call.mean, call.sigma, call.own, self.statistic,
            partial(self._stream_gradients, rules, call),
        )  # fmt: skip
        with outside_inference_mode(), torch.no_grad():
            self._bind(after)
            stream.write(self._own(), after)
        self._marked = False
        return self.leave(y)

    def _compiled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """A training call as the compiler sees it."""
        if self._scaler is not None:
            raise RuntimeError(
                "a streaming layer with a GradScaler attached cannot be compiled: detach the scaler and train in "
                "bfloat16, or leave the model uncompiled"
            )
        state = self._state
        if not state.mean.numel():
            raise RuntimeError(
                f"{self.ref} is bound to a spatial size by its first training call, which has to run uncompiled: call "
                "the model once before torch.compile"
            )
        rules, fused = self.rules, mask is None and fuses_compiled(x, self.weight, state.mean, self.statistic)
        return stream_compiled(x, self.weight, self.bias, mask, rules, fused, state)

    def _bind(self, like: State) -> None:
        """The first call binds a layer whose statistics have a location to a spatial size."""
        if like.mean.shape != self._state.mean.shape:
            self._state = stream.new_state(tuple(like.mean.shape), like.seen)

    def _stream_gradients(
        self, rules: Rules, call: Call, grad_mean: Tensor, grad_sigma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """G for the backward pass of a call, into the state of the layer as it is then."""
        self._backward_runs()
        state = self._settled()
        scale = None if self._scaler is None else state.loss_scale
        shape = self.ref.statistic_shape(self.num_features, tuple(grad_mean.shape[2:]))
        # After a reset between forward and backward there may be no stream of this shape any more: start one.
        known = tuple(state.mean.shape) == shape
        grads = state.grads if known else stream.new_stream(shape, state.seen)
        grads, passed_on = stream_gradients(rules, grads, call, grad_mean, grad_sigma, scale)
        if known:
            stream.write(state, replace(state, grads=grads))
        return passed_on

    @property
    def rules(self) -> Rules:
        return Rules(self.statistic, self.alpha, self.beta, self.kappa, self.warmup)

    @property
    def state(self) -> State:
        """All state, as it is."""
        return self._state

    def begin_call(self) -> State:
        """What a fused training call streams its statistics into."""
        self._forward_runs()
        return self._settled()

    def receive(self) -> tuple[State, float]:
        """What the backward pass of a fused call streams its gradients into, and the scale of the loss."""
        self._backward_runs()
        state = self._settled()
        return state, 1.0 if self._scaler is None else float(state.loss_scale)

    def fused_settings(self) -> bytes | None:
        """The settings for the kernels; None where they do not serve this layer."""
        statistic = self.ref, self.p, self.center, self.eps
        streaming = self.alpha, self.beta, self.kappa, self.warmup
        return fused_settings(statistic, streaming, self._state.mean, self.weight)

    def _mark_update(self, found_inf: Tensor | None) -> None:
        state = self._own()
        for pending in (state.stats.pending, state.grads.pending):
            if found_inf is None:
                pending.fill_(True)
            else:
                pending.logical_or_((found_inf == 0).reshape(()).to(pending.device))
        if not self._marked:
            self._marked = True

    def _settled(self) -> State:
        """The state, after dropping the gradients of a step that the scaler skipped: it lowers its scale then."""
        state = self._own()
        if self._scaler is not None:
            scale = loss_scale(self._scaler, state.seen)
            skipped = (scale < state.loss_scale) & ~state.stats.pending
            stream.write(state, replace(state, grads=stream.drop(state.grads, skipped), loss_scale=scale))
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> "StreamingNorm":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._state = stream.from_dict({k: moved(tensor, fn) for k, tensor in stream.to_dict(self._state).items()})
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._settled()
        for name, tensor in stream.to_dict(self._handed_out()).items():
            destination[prefix + name] = tensor
        self._marked = True  # the pending mark may be written to through what was handed out

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = stream.to_dict(self._state).keys()
        ours = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if ours and (local_metadata.get("version") or self._version) > self._version:
            error_msgs.append(f"{prefix}* was saved by a newer streamnorm (state version {local_metadata['version']})")
            return
        foreign = BATCHNORM_KEYS if is_batchnorm(state_dict, prefix) and not ours else ()
        others = {k: v for k, v in state_dict.items() if k.removeprefix(prefix) not in (*names, *foreign)}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if foreign:
            self._load_batchnorm(batchnorm_statistics(state_dict, prefix, self.eps), prefix, error_msgs)
        elif len(ours) < len(names):
            missing_keys.extend(prefix + name for name in names if name not in ours)
        else:
            self._load_state(ours, prefix, local_metadata.get("assign_to_params_buffers", False), error_msgs)

    def _load_state(self, loaded: dict[str, Tensor], prefix: str, assign: bool, error_msgs: list[str]) -> None:
        shape = loaded["mean"].shape
        template = stream.to_dict(stream.new_state(tuple(shape), self._state.seen))
        legal = self.can_hold(shape)
        wrong = [name for name, like in template.items() if not legal or loaded[name].shape != like.shape]
        error_msgs.extend(
            f"size mismatch for {prefix}{name}: the checkpoint has {tuple(loaded[name].shape)}, which does not fit "
            f"{self.num_features} channels, {self.ref} and present statistics of shape {tuple(self.mean.shape)}"
            for name in wrong
        )
        if not wrong:
            device = None if assign else self._state.seen.device
            self._state = stream.from_dict(
                {
                    name: loaded[name].detach().to(device=device, dtype=like.dtype, copy=True)
                    for name, like in template.items()
                }
            )
            self._marked = True

    def _load_batchnorm(self, statistics: tuple[Tensor, Tensor] | None, prefix: str, error_msgs: list[str]) -> None:
        """Start the streams from a trained `nn.BatchNorm`, without a warm-up; from nothing if it never saw data."""
        fresh = stream.new_state(self.initial_shape(), self._state.seen)
        if statistics is None:
            self._state = fresh
            return
        both = torch.stack([value.detach().to(self.mean) for value in statistics])
        if both.shape[1:] != self.mean.shape or self.ref.located:
            error_msgs.append(
                f"{prefix}running_mean of shape {tuple(both.shape[1:])} is per channel, the statistics of {self.ref} "
                f"have shape {tuple(self.mean.shape)}: load an nn.BatchNorm into BA1 or SP2 with as many channels"
            )
            return
        stats = replace(fresh.stats, long=both, short=both.clone(), empty=torch.zeros_like(fresh.stats.empty))
        mean, sigma = both[0].clone(), both[1].clone()
        self._state = replace(fresh, stats=stats, mean=mean, sigma=sigma, seen=fresh.seen + max(self.warmup, 1.0))

    def extra_repr(self) -> str:
        return self.settings(alpha=self.alpha, beta=self.beta, kappa=self.kappa, warmup=self.warmup)
