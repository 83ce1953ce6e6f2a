"""A few trainings in which backends differ if anything is wrong with them, and what came out of each."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from . import sequences
from .agreement import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    TOLERANCE,
    Case,
    Differs,
    Seen,
    arithmetic,
    difference,
    law_of,
    layer_of,
    on,
    trained_by,
)

IMAGES, ROWS = (8, 16, 9, 9), (32, 24)
LAST = ("channels last", "channels last")
FEW = ((1,), (1,), (2, 1), (1,))
CASES = {
    "images": Case(shape=IMAGES),
    "rows": Case(shape=ROWS),
    "more than one block": Case(shape=(16, 64, 16, 16), windows=((1,), (1,))),
    "one sample": Case(shape=(1, 16, 9, 9), windows=FEW),
    "two rows": Case(shape=(2, 24), windows=FEW),
    "channels last": Case(shape=IMAGES, layouts=LAST),
    "with gaps": Case(shape=IMAGES, layouts=("with gaps", "transposed")),
    "p = 1": Case(shape=IMAGES, settings={"p": 1.0}),
    "the paper's rule": Case(shape=IMAGES, settings={"warmup": 0, "guard": False, "center": "mean"}),
    "neuron-wise": Case(shape=IMAGES, settings={"ref": "BA6", "center": "zero"}),
    "no gain": Case(shape=IMAGES, absent=("weight", "bias")),
    "masked": Case(shape=IMAGES, masked=True),
    "bfloat16": Case(shape=IMAGES, dtypes=(BF16, F32)),
    "float16": Case(shape=IMAGES, dtypes=(F16, F32)),
    "float64": Case(shape=IMAGES, dtypes=(F64, F64)),
    "batch norm": Case(kind="batch", shape=IMAGES),
    "layer norm": Case(kind="sample", shape=IMAGES),
}
OK, DIFFERS, FAILED, DECLINED = "ok", "differs", "failed", "declined"


class Row(NamedTuple):
    """What a backend made of a case."""

    backend: str
    case: str
    outcome: str  # OK, DIFFERS, FAILED or DECLINED
    difference: float = 0.0  # the largest, against its tolerance: in parts of the largest value
    tolerance: float = 0.0
    where: str = ""  # the result that it is in
    repeats: bool = True  # whether the same once more is the same to the last bit
    words: str = ""  # why it was declined, or failed

    @property
    def is_good(self) -> bool:
        return self.outcome in (OK, DECLINED)


def has_float64(device: torch.device) -> bool:
    """Apple's GPUs do not."""
    try:
        torch.zeros(1, dtype=F64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def agree(device: torch.device, chosen: dict[str, Case] = CASES) -> Iterator[Row]:
    """Every backend that there is, in every case, on the device, against plain torch in float64 on the CPU."""
    names = backends.available()
    wide = has_float64(device)
    for label, case in chosen.items():
        expected, fed = law_of(case)
        for name in names:
            if F64 in case.dtypes and not wide:
                yield Row(name, label, DECLINED, words=f"{device.type} has no float64")
            elif reason := declined(name, case, fed[0], device):
                yield Row(name, label, DECLINED, words=reason)
            else:
                trained = partial(trained_by, name, case, fed, str(device))
                yield _compared(name, label, trained, expected, arithmetic(case))


def agree_on_sequences(device: torch.device) -> Iterator[Row]:
    """The same for whole sequences of recurrent layers, in float32."""
    for label, case in sequences.SEQUENCES.items():
        expected = sequences.law_of(case)
        for name in backends.available():
            if reason := sequences.declined(name, case, str(device)):
                yield Row(name, label, DECLINED, words=reason)
            else:
                trained = partial(sequences.trained_by, name, case, F32, str(device))
                yield _compared(name, label, trained, expected, sequences.TOLERANCE)


def declined(name: str, case: Case, fed: tuple[Tensor, Tensor, Tensor | None], device: torch.device) -> str:
    """Why a backend does not serve the calls of a case; nothing if it does."""
    x, mask = LAYOUTS[case.layouts[0]](fed[0].to(device)), None if fed[2] is None else fed[2].to(device)
    with backends.use(name):
        said = backends.explain(on(layer_of(case), str(device)), x.requires_grad_(), mask)
    if said.startswith(f"{name} serves"):
        return ""
    found = re.search(rf"\b{name} does not: (.*?)\.(?: \w+ does not:|$)", said)
    return found[1] if found else said


def _compared(name: str, label: str, trained: Callable[[], Seen], expected: Seen, least: float) -> Row:
    """`least`: the tolerance, for results of which more is not known."""
    try:
        actual, again = trained(), trained()
        worst = largest(actual, expected, least)
    except Differs as error:
        return Row(name, label, DIFFERS, words=str(error))
    except Exception as error:  # a backend may fail in any way: the others are still to be tried
        words = str(error).strip().splitlines() or [""]
        return Row(name, label, FAILED, words=f"{type(error).__name__}: {words[0][:200]}")
    repeats = all(torch.equal(value, again[key]) for key, value in actual.items())
    outcome = OK if worst[0] <= worst[1] and repeats else DIFFERS
    return Row(name, label, outcome, *worst, repeats)


def largest(actual: Seen, expected: Seen, least: float) -> tuple[float, float, str]:
    """The difference that is largest against its tolerance, that tolerance, and the name of the result."""
    if actual.keys() != expected.keys():
        raise Differs(f"other results: {', '.join(sorted(actual.keys() ^ expected.keys()))}")
    found = (0.0, least, "")
    for name, value in expected.items():
        try:
            error = difference(actual[name], value)
        except Differs as error_of:
            raise Differs(f"{name}: {error_of}") from None
        if error and not value.is_floating_point():
            return error, 0.0, name
        tolerance = max(least, TOLERANCE.get(actual[name].dtype, 0.0))
        if error / tolerance > found[0] / found[1]:
            found = error, tolerance, name
    return found
