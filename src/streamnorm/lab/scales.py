"""How large an experiment is made: the paper's own numbers, an hour on two cores, or seconds for a test."""

from dataclasses import dataclass, replace

from .runs import IMAGES, Run

EVALUATIONS = 4  # per epoch of images


@dataclass(frozen=True)
class Scale:
    name: str
    text: str  # what `--help` says
    images: int | None  # training images; None: all
    test_images: int | None
    epochs: float | None  # None: the paper's
    width: int | None  # channels of the convolutional nets; None: the paper's
    units: int | None  # of the fully-connected and recurrent nets
    characters: int | None
    test_characters: int | None
    chunk: int | None
    seeds: int


SMOKE = Scale("smoke", "seconds: shows that everything works", 64, 32, 1, 4, 8, 6_000, 300, 10, 1)
QUICK = Scale(
    "quick", "10,000 images, 3 epochs, width 16; 500,000 characters", 10_000, 2_000, 3, 16, None, 500_000, None, None, 3
)
PAPER = Scale("paper", "the paper's own numbers", None, None, None, None, None, None, None, None, 3)
SCALES = {scale.name: scale for scale in (SMOKE, QUICK, PAPER)}


def scaled(run: Run, scale: Scale, data: str | None = None) -> Run:
    """`run` at another scale, and on other data if `data` is given."""
    rates = run.rates
    if scale.epochs is not None:
        rates = tuple((rate, epochs * scale.epochs / run.epochs) for rate, epochs in run.rates)
    run = replace(run, rates=rates, data=data or run.data)
    if run.is_text:
        return replace(
            run,
            width=scale.units or run.width,
            chunk=scale.chunk or run.chunk,
            samples=run.samples // 8 if scale is SMOKE else run.samples,
            train_size=scale.characters,
            test_size=scale.test_characters,
        )
    images = min(scale.images or IMAGES[run.data], IMAGES[run.data])
    return replace(
        run,
        width=(scale.units if run.net == "A" else scale.width) or run.width,
        train_size=scale.images,
        test_size=scale.test_images,
        evaluate=max(images // run.samples // EVALUATIONS, 1),
    )
