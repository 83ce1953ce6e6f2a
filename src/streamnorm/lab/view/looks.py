"""How curves look: the same method the same colour in every figure, and each told apart without colour as well.

Colours differ in lightness, lines in their dashes, and every curve of a figure has its own marker. All are equally
thick.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    colour: str
    dashes: tuple[float, ...]  # on, off, on, off; empty: solid
    marker: str
    hollow: bool  # whether the marker is an outline


SOLID: tuple[float, ...] = ()
DASHED, DOTTED, MIXED = (5.0, 1.6), (1.2, 1.2), (6.0, 1.6, 1.2, 1.6)
DASHES = (SOLID, DASHED, MIXED, DOTTED)
VARIANTS = {"S": SOLID, "B": DASHED, "32 x 1": SOLID, "2 x 16": DASHED, "1 x 32": DOTTED}
MARKERS = "os^DvP"  # full, then as outlines
# Chosen from the palettes of Okabe & Ito and of Tol, which are told apart with any kind of colour vision.
COLOURS = {
    "streaming": "#000000",
    "LN": "#d98200",
    "BN": "#0064b0",
    "TSBN": "#00936b",
    "SP2": "#b3404a",
    "SP3": "#8a7a1f",
    "SP4": "#e0607e",
    "SP5": "#6b3d0c",
    "BA2": "#3a9bdc",
    "BA3": "#aa4499",
    "BA4": "#117733",
    "BA5": "#332288",
    "BA6": "#6f7f8f",
}
SAME = {"SP1 (LN)": "LN", "SP1": "LN", "BA1 (BN)": "BN", "BA1": "BN"}
# For curves of one method that differ in a setting.
OTHERS = ("#0064b0", "#d98200", "#00936b", "#aa4499", "#000000", "#3a9bdc", "#b3404a", "#8a7a1f", "#332288", "#6f7f8f")


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each curve of a figure."""
    found: dict[str, Look] = {}
    others = iter(OTHERS * 10)
    for i, label in enumerate(labels):
        method, variant = parted(label)
        dashes = VARIANTS.get(variant, DASHES[i % len(DASHES)])
        colour = COLOURS.get(method) or next(others)
        shape, hollow = (i // 2, variant == "B") if variant in ("B", "S") else (i, i % 12 > 5)
        found[label] = Look(colour, dashes, MARKERS[shape % 6], hollow)
    return found


def parted(label: str) -> tuple[str, str]:
    """The method and what is varied of it: BN, 1 x 32; BA4, S."""
    if label in SAME:
        return SAME[label], ""
    for mark in ("-", " "):
        method, _, variant = label.partition(mark)
        method = SAME.get(method, method)
        if variant and method in COLOURS:
            return method, variant
    return label, ""
