"""What recurrent cells and sequence layers share: their weights and norms, and the checks at the door."""

from collections.abc import Sequence
from inspect import signature
from math import prod, sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...engine.compat import has_hooks
from ...engine.context import check_memory, in_memory
from ..base import Device, Norm, check_dtype, check_flag
from .step import GRU_KIND, GRU_RESET_AFTER_KIND, Factory, Gates, Hidden, Kind, Norms, Product

ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
Carried = TypeVar("Carried")  # from step to step: h, or (h, c) of an LSTM
STATE = "(num_layers * directions, N, hidden_size"  # without its end: images have a size


class RecurrentBase(nn.Module):
    """Weights and norms under the names of torch.nn; the sizes are in features or channels."""

    kind: Kind

    def __init__(
        self,
        product: Product,
        input_size: int,
        hidden_size: int,
        norm: Factory | None,
        nonlinearity: str,
        bias: bool,
        cell_norm: bool,
        suffixes: Sequence[tuple[str, int]],  # of each layer and direction: its name and the size of its input
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        if nonlinearity not in ACTIVATIONS:
            raise ValueError(f'nonlinearity={nonlinearity!r}: use "tanh" or "relu"')
        if norm is not None and not callable(norm):
            raise TypeError(
                f"norm={norm!r}: pass a class such as StreamingNorm, a function (size, device, dtype), or None"
            )
        if cell_norm and norm is None:
            raise ValueError("cell_norm=True needs a norm")
        self.product = product
        self.input_size, self.hidden_size = input_size, hidden_size
        self.nonlinearity = nonlinearity
        self.bias = check_flag("bias", bias) and norm is None  # with a norm, its own bias serves
        rows = self.kind.gates * hidden_size
        for suffix, size in suffixes:
            for name, columns in (("weight_ih", size), ("weight_hh", hidden_size)):
                weight = torch.empty(product.weight_shape(rows, columns), device=device, dtype=dtype)
                self.register_parameter(name + suffix, nn.Parameter(weight))
            for name in ("bias_ih", "bias_hh"):
                vector = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if self.bias else None
                self.register_parameter(name + suffix, vector)
        for suffix, _ in suffixes:
            norms = None if norm is None else Norms(norm, self.kind.gates, hidden_size, cell_norm, device, dtype)
            self.add_module("norms" + suffix, norms)
        self._init_weights()

    def _init_weights(self) -> None:
        """Uniform within 1/sqrt(size of what enters a hidden unit from the hidden state), as torch.nn does."""
        bound = 1 / sqrt(prod(self.product.weight_shape(1, self.hidden_size)))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def reset_parameters(self) -> None:
        """New weights; norms as new, their statistics included."""
        self._init_weights()
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def _taken(self, suffix: str, columns: int, x: Tensor) -> tuple[Gates, Tensor, Tensor | None]:
        """The gates of a layer and direction, and weight and bias of its input: each read once, and checked.

        `columns`: the size of what enters it. Anything can be assigned to a parameter, or come from a parametrization.
        """
        rows, like = self.kind.gates * self.hidden_size, x if x.is_floating_point() else next(self.parameters())
        found: dict[str, Any] = {}
        for name, size in (("weight_ih", columns), ("weight_hh", self.hidden_size), ("bias_ih", 0), ("bias_hh", 0)):
            found[name] = tensor = getattr(self, name + suffix)
            if tensor is not None or size:  # there may be no bias
                shape = self.product.weight_shape(rows, size) if size else (rows,)
                self._check_parameter(name + suffix, tensor, shape, like)
        norms = getattr(self, "norms" + suffix)
        if norms is not None:
            for side in ("x", "h"):
                if len(getattr(norms, side)) != self.kind.gates:
                    made = f"norms{suffix}.{side} has {len(getattr(norms, side))} norms"
                    raise ValueError(f"{made}: {type(self).__name__} needs one per gate, {self.kind.gates}")
        gates = Gates(self.kind, self.product, found["weight_hh"], found["bias_hh"], norms, self.hidden_size)
        return gates, found["weight_ih"], found["bias_ih"]

    def _check_parameter(self, name: str, tensor: Any, shape: tuple[int, ...], like: Tensor) -> None:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
        if got != shape:
            raise ValueError(
                f"{name} has shape {got}: {type(self).__name__} with input_size={self.input_size} and hidden_size="
                f"{self.hidden_size} needs {shape}; set a parameter of that shape, or take off what changed it"
            )
        typed = tensor.dtype == like.dtype or torch.is_autocast_enabled(like.device.type)
        if tensor.device != like.device or not typed or not tensor.is_floating_point():
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}, the input {like.dtype} on {like.device}: convert the "
                "input, or the whole layer with layer.to(...)"
            )
        check_memory(**{name: tensor})

    def _check_affine(self) -> None:
        """Gains and biases of the norms; those of a norm with hooks may be brought by them."""
        for path, norm in self.named_modules():
            if not isinstance(norm, Norm):
                continue
            for name, vector in norm._parameters.items():
                if vector is None or (_is_vector(vector, norm.num_features) and in_memory(vector)) or has_hooks(norm):
                    continue
                if not _is_vector(vector, norm.num_features):
                    raise ValueError(
                        f"{path}.{name} is {vector.dtype} of shape {tuple(vector.shape)}: a norm of "
                        f"{norm.num_features} features needs floating point of shape ({norm.num_features},)"
                    )
                check_memory(**{f"{path}.{name}": vector})

    def _input_products(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_floating_point():
            return self.product(x, weight, bias)
        products = nn.functional.embedding(x, weight.t().contiguous())  # the columns that one-hot vectors would pick
        return products if bias is None else products + bias

    def _check_input(self, x: Tensor, dims: tuple[int, ...], features: int, layout: str) -> None:
        """`dims`: how many dimensions there may be; `features`: which of them holds the features."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"input is {kind}: pass a floating point tensor {layout}")
        if x.ndim not in dims:
            alone = ", x.unsqueeze(0) if it is one sample" if x.ndim + 1 in dims else ""
            raise ValueError(f"input of shape {tuple(x.shape)}: expected {layout}{alone}")
        if x.shape[features] != self.input_size:
            raise ValueError(
                f"input of shape {tuple(x.shape)} has {x.shape[features]} features, not {self.input_size}: expected "
                f"{layout} with input_size={self.input_size}"
            )
        if x.layout != torch.strided:
            raise TypeError(f"input is {x.layout}: pass a dense tensor, such as x.to_dense()")
        check_memory(input=x)

    def _states(self, hx: Any, shape: tuple[int, ...], meaning: str, x: Tensor) -> Hidden:
        """The initial state, checked; zeros by default. `meaning`: of its shape."""
        if not x.is_floating_point():
            x = next(self.parameters())  # indices have the type of no state
        if hx is None:
            return tuple(x.new_zeros(shape) for _ in range(self.kind.states))
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        wanted = (
            f"expected {'a tensor' if self.kind.states == 1 else 'a pair (h, c), each'} of shape {shape} = {meaning}"
        )
        if not all(isinstance(s, Tensor) for s in states):
            raise TypeError(f"hx is {type(hx).__name__}: {wanted}")
        if len(states) != self.kind.states or any(tuple(s.shape) != shape for s in states):
            raise ValueError(f"hx of shape {', '.join(str(tuple(s.shape)) for s in states)}: {wanted}")
        for s in states:
            typed = s.dtype == x.dtype or (s.is_floating_point() and torch.is_autocast_enabled(x.device.type))
            if s.device != x.device or not typed or s.layout != torch.strided:
                raise TypeError(
                    f"hx is {s.dtype}, {s.layout} on {s.device}, the input {x.dtype} on {x.device}: convert it, as "
                    "with hx.to_dense().to(x)"
                )
            check_memory(hx=s)
        return states

    def _packaged(self, state: Hidden) -> Any:
        return state if self.kind.states > 1 else state[0]

    def extra_repr(self) -> str:
        """The sizes, and what differs from the defaults; norms show themselves."""
        norms = [each for each in self.children() if isinstance(each, Norms)]
        # With norms, which have their own, there is no bias to speak of.
        about = {"bias": True, "cell_norm": norms[0].cell is not None} if norms else {"norm": None}
        given, taken = vars(self) | about, list(signature(type(self).__init__).parameters.values())[3:]
        words = [
            f"{each.name}={given[each.name]!r}"
            for each in taken
            if each.name in given and given[each.name] != each.default
        ]
        return ", ".join([str(self.input_size), str(self.hidden_size), *words])


def _is_vector(tensor: Tensor, size: int) -> bool:
    return tensor.ndim == 1 and tensor.shape[0] == size and tensor.is_floating_point()


class EitherGRU(RecurrentBase):
    """What all GRUs share: where the reset gate acts, and that weights are not taken for those of the other form.

    A state_dict has a key `reset_after` where the form is not the one that its other keys speak for: weights alone are
    those of `torch.nn.GRU`, which resets after the product; with norms, it is the paper's form.
    """

    kind = GRU_KIND
    reset_after = False

    def _choose(self, reset_after: bool) -> None:
        if not isinstance(reset_after, bool):
            raise ValueError(f"reset_after={reset_after!r}: must be False (the paper's GRU) or True (torch's)")
        self.reset_after = reset_after
        if reset_after:
            self.kind = GRU_RESET_AFTER_KIND

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        norms = any(isinstance(each, Norms) for each in self.children())
        if self.reset_after == norms:
            destination[prefix + "reset_after"] = torch.tensor(self.reset_after, device="cpu")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if any(key.startswith("weight_") for key in own):
            implied = not any(key.startswith("norms") for key in own)
            self._check_form(prefix + "reset_after", own.get("reset_after"), implied)
        others = {key: value for key, value in state_dict.items() if key != prefix + "reset_after"}
        super()._load_from_state_dict(others, prefix, *rest)

    def _check_form(self, key: str, mark: Any, implied: bool) -> None:
        """Raised at once, before the norms load."""
        if mark is not None and not (isinstance(mark, Tensor) and mark.numel() == 1):
            raise RuntimeError(f"{key} in the state_dict is {mark!r}: it must be a tensor of one bool, or missing")
        form = implied if mark is None else self.reset_after if mark.is_meta else bool(mark)
        if form == self.reset_after:
            return
        name, where = type(self).__name__, ("before", "after")
        whose = ", as torch.nn's do" if form and mark is None else ""
        more = ""
        if mark is None and implied:
            more = f". If they are of the paper's form all the same, set state_dict[{key!r}] = torch.tensor(False)"
        raise RuntimeError(
            f"the weights in the state_dict are of a GRU that resets {where[form]} the matrix product{whose}, this "
            f"{name} resets {where[not form]} it: they would compute something else. Make it {name}(..., "
            f"reset_after={form}){more}"
        )
