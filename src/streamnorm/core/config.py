"""The settings of a norm: the one list of them, with their defaults and checks."""

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import isfinite
from typing import Any, ClassVar

from .reference import CODES, NormRef, resolve

EVAL_MEMORY = 64.0  # samples: with alpha2 = 0.3, windows of 20 or more are averaged no further
CENTERS = ("mean", "running", "zero")  # settings A, B and C of the paper


@dataclass(frozen=True)
class Statistic:
    """Which statistics a norm takes: everything that S depends on but the data.

    sigma = (average |x - c|^p + eps^(p/2))^(1/p).

    Args:
        ref: which activations share statistics, a code of the paper or a `NormRef`.
        p: the order of the moment, at least 1.
        center: c is the "mean" of the reference (setting A), the "running" mean (B), or "zero" (C).
        eps: added inside of the root of sigma.
    """

    ref: NormRef = CODES["BA1"]
    p: float = 2.0
    center: str = "running"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not (is_number(self.p) and self.p >= 1):
            raise ValueError(f"p={self.p!r}: the order of the moment must be a finite number of at least 1")
        if not (is_number(self.eps) and self.eps >= 0):
            raise ValueError(f"eps={self.eps!r}: must be a finite number of at least 0")
        if self.center not in CENTERS:
            raise ValueError(f'center={self.center!r}: use "mean" (setting A), "running" (B) or "zero" (C)')
        self._set(ref=resolve(self.ref), p=float(self.p), eps=float(self.eps))

    @property
    def implied(self) -> dict[str, Any]:
        """What stands for None, by the other settings."""
        return {}

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Config(Statistic):
    """Everything that a streaming norm is told: which statistics it takes, and how it streams them.

    Args:
        ref, p, center, eps: as in `StreamingNorm`.
        alpha: weights of `long` and `short` in s_hat.
        beta: weights of `long`, `short` and the present gradient in g_hat.
        kappa: weights of `long` and `short` in a fold of H1, then of H2; alpha for both if None.
        warmup: elements per statistic for which the layer turns from a layer norm into a streaming norm; 0 switches
            that off. Not the paper's.
        guard: whether windows with few elements count for less, and large samples in several calls go half by their
            own gradient of the statistics. Not the paper's.
        eval_memory: samples that evaluation averages over, at least; 0 is the paper's latest s_hat. None: 64, and 0
            without the guard. Not the paper's.

    Example:
        >>> Config(alpha=(0.9, 0.1)).kappa
        (0.9, 0.1, 0.9, 0.1)
    """

    alpha: tuple[float, ...] = (0.7, 0.3)
    beta: tuple[float, ...] = (0.7, 0.3, 0.0)
    kappa: tuple[float, ...] = None  # type: ignore[assignment]  # alpha, twice
    warmup: float = 256
    guard: bool = True
    eval_memory: float = None  # type: ignore[assignment]  # by the guard
    text: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.warmup) and self.warmup >= 0):
            raise ValueError(f"warmup={self.warmup!r}: must be a finite number of at least 0 (elements per statistic)")
        if not isinstance(self.guard, bool):
            raise ValueError(f"guard={self.guard!r}: must be True, or False for the paper's rule at any size of window")
        self._set(
            alpha=numbers("alpha", self.alpha, "long short"), beta=numbers("beta", self.beta, "long short present")
        )
        self._set(**{name: value for name, value in self.implied.items() if getattr(self, name) is None})
        self._set(kappa=numbers("kappa", self.kappa, "long-stats short-stats long-grads short-grads"))
        if not (is_number(self.eval_memory) and self.eval_memory >= 0):
            raise ValueError(
                f"eval_memory={self.eval_memory!r}: must be a finite number of at least 0 (samples), or None"
            )
        self._set(eval_memory=float(self.eval_memory))
        # All of it as text, which the compiler's operators are given.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        self._set(text=repr(values | {"ref": (self.ref.samples, self.ref.channels, self.ref.space)}))

    @property
    def implied(self) -> dict[str, Any]:
        return {"kappa": self.alpha * 2, "eval_memory": EVAL_MEMORY if self.guard else 0.0}


@lru_cache(maxsize=256)
def from_text(text: str) -> Config:
    """The inverse of `Config.text`."""
    values = literal_eval(text)
    return Config(**values | {"ref": NormRef(*values["ref"])})


STATISTIC = tuple(field.name for field in fields(Statistic))
SETTINGS = tuple(field.name for field in fields(Config))

# The settings with which a layer that is called once per weight update is a batch norm.
EXACT: dict[str, Any] = {"alpha": (0.0, 1.0), "beta": (0.0, 0.0, 1.0), "center": "mean", "warmup": 0, "guard": False}
EXACT |= {"eval_memory": 0.0}


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def numbers(name: str, values: Sequence[float], meaning: str) -> tuple[float, ...]:
    """`values` as floats, one for each word of `meaning`."""
    wanted = len(meaning.split())
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(is_number, values)):
        raise ValueError(f"{name}={values!r}: must be {wanted} finite numbers ({meaning})")
    if len(values) != wanted:
        raise ValueError(f"{name}={values!r} has {len(values)} numbers: it takes {wanted} ({meaning})")
    return tuple(map(float, values))
