"""One suspect at a time: a figure with one setting changed in all of its curves, to see what a claim depends on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import LabError
from .runs import Run

Value = float | str
Variation = dict[str, Value]  # by name; as files have it
AFTER = "after"


@dataclass(frozen=True)
class Setting:
    text: str  # what `--help` says
    told: str  # in tables; with a place for the value
    read: Callable[[str], Value]
    apply: Callable[[Run, Any], Run]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _after(text: str) -> str:
    if text != AFTER:
        raise ValueError
    return text


def _with_rate(run: Run, factor: float) -> Run:
    return replace(run, rates=tuple((float(f"{rate * factor:.3g}"), epochs) for rate, epochs in run.rates))


def _with_epochs(run: Run, epochs: float) -> Run:
    """As many in all, each rate for its share of them."""
    return replace(run, rates=tuple((rate, each * epochs / run.epochs) for rate, each in run.rates))


SETTINGS = {
    "start": Setting(
        "factor of the first weights that norms follow", "start x {:g}", _positive,
        lambda run, value: replace(run, start=value),
    ),
    "rate": Setting("factor of the learning rate", "rate x {:g}", _positive, _with_rate),
    "epochs": Setting("of the training", "{:g} epochs", _positive, _with_epochs),
    "width": Setting("units or channels", "width {}", _whole, lambda run, value: replace(run, width=value)),
    "test": Setting(
        f"{AFTER}: test after the update of a window, not before", "tested {} updates", _after,
        lambda run, _: replace(run, test_first=False),
    ),
}  # fmt: skip


def read_variation(text: str) -> tuple[str, Value]:
    """As in "start=4"."""
    name, _, value = text.partition("=")
    if name not in SETTINGS:
        raise LabError(f"--vary {text}: {name!r} is none of {', '.join(SETTINGS)}; write, for example, start=4")
    try:
        return name, SETTINGS[name].read(value)
    except ValueError:
        raise LabError(f"--vary {text}: {value!r} does not fit: {name} is {SETTINGS[name].text}") from None


def varied(run: Run, variation: Mapping[str, Value]) -> Run:
    for name, value in variation.items():
        run = SETTINGS[name].apply(run, value)
    return run


def words(variation: Mapping[str, Value]) -> str:
    """As people read it."""
    return ", ".join(SETTINGS[name].told.format(value) for name, value in variation.items())


def file_words(variation: Mapping[str, Value]) -> list[str]:
    """For the name of a file."""
    return [f"{name}-{value if isinstance(value, str) else format(value, 'g')}" for name, value in variation.items()]
