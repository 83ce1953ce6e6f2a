"""Which activations share statistics: the normalization reference (NormRef) of the paper."""

from dataclasses import dataclass
from typing import Literal

WINDOW = 5  # the paper does not say; ours


@dataclass(frozen=True)
class NormRef:
    """The set of activations whose statistics normalize one neuron.

    Args:
        samples: pool over the mini-batch, or one statistic per sample.
        channels: "each" channel has its own statistics, or "all" channels share them.
        space: "all" locations, an odd window sliding with stride 1 (at the border only what is inside counts), or 1,
            the location itself.

    Example:
        >>> from streamnorm import StreamingNorm
        >>> StreamingNorm(3).ref == NormRef(samples=True, channels="each", space="all")  # BA1
        True
        >>> NormRef(samples=False, channels="all", space=4)
        Traceback (most recent call last):
        ValueError: NormRef space=4: use "all", 1, or an odd window such as 5
    """

    samples: bool = True
    channels: Literal["each", "all"] = "each"
    space: Literal["all"] | int = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.samples, bool):
            raise ValueError(f"NormRef samples={self.samples!r}: use True (pool the mini-batch) or False")
        if self.channels not in ("each", "all"):
            raise ValueError(f'NormRef channels={self.channels!r}: use "each" or "all"')
        odd = type(self.space) is int and self.space > 0 and self.space % 2 == 1
        if not odd and self.space != "all":
            raise ValueError(f'NormRef space={self.space!r}: use "all", 1, or an odd window such as 5')

    @property
    def located(self) -> bool:
        """Whether every location has statistics of its own."""
        return self.space != "all"

    @property
    def window(self) -> int:
        """Side of the sliding window; 0 when there is none (`space` is "all" or 1)."""
        return self.space if isinstance(self.space, int) and self.space > 1 else 0

    def statistic_shape(self, channels: int, space: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one statistic of a mini-batch: BA1 `(C,)`, BA2 `()`, BA6 `(C, *space)`."""
        return (channels,) * (self.channels == "each") + (space if self.located else ())

    def kept_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in which a statistic of a mini-batch broadcasts against its input `(N, C, *space)`."""
        _, c, *space = shape
        return 1, c if self.channels == "each" else 1, *(size if self.located else 1 for size in space)

    def fewest_elements(self, shape: tuple[int, ...]) -> int:
        """Elements of the smallest reference in an input `(N, C, *space)`; windows are smallest in a corner."""
        n, c, *space = shape
        pooled = (n if self.samples else 1) * (c if self.channels == "all" else 1)
        for size in space:  # a loop, which torch.compile can follow
            pooled *= min(self.window // 2 + 1, size) if self.located else size
        return pooled


# BA1, BA6 and "LN is a sample normalization" are certain; the other rows are reconstructed from the text.
CODES = {
    "BA1": NormRef(True, "each", "all"),  # batch norm
    "BA2": NormRef(True, "all", "all"),
    "BA3": NormRef(True, "all", WINDOW),
    "BA4": NormRef(True, "each", WINDOW),
    "BA5": NormRef(True, "all", 1),
    "BA6": NormRef(True, "each", 1),  # neuron-wise
    "SP1": NormRef(False, "all", "all"),  # layer norm
    "SP2": NormRef(False, "each", "all"),  # instance norm
    "SP3": NormRef(False, "all", WINDOW),
    "SP4": NormRef(False, "each", WINDOW),
    "SP5": NormRef(False, "all", 1),  # layer norm at every location
}


def code_of(ref: NormRef) -> str | NormRef:
    """The paper's code of a reference, or the reference itself."""
    return next((code for code, each in CODES.items() if each == ref), ref)


def resolve(ref: str | NormRef) -> NormRef:
    """The NormRef that a code of the paper, or a NormRef itself, stands for."""
    if isinstance(ref, NormRef):
        return ref
    if not isinstance(ref, str) or ref not in CODES:
        raise ValueError(f"ref={ref!r}: use one of {', '.join(CODES)}, or a NormRef")
    return CODES[ref]
