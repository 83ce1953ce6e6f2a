"""What benchmarks with one table share: it is measured and may be written, or what was written is shown."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from streamnorm.lab import models
from streamnorm.lab.data import Images, load_images
from streamnorm.lab.results import PER_CENT, Result, mean_and_error
from streamnorm.lab.runs import Run
from streamnorm.lab.store import read_json, write_json
from streamnorm.lab.train import train


def measure_or_show(
    parser: argparse.ArgumentParser, measured: Callable[[Any], dict[str, Any]], table: Callable[[dict[str, Any]], str]
) -> None:
    parser.add_argument("--out", type=Path, help="where to write the numbers")
    parser.add_argument("--table", type=Path, help="show numbers that were written")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read_json(chosen.table)))
        return
    torch.set_num_threads(1)
    result = measured(chosen)
    if chosen.out:
        write_json(chosen.out, result)
    print(table(result))


def measure_on_images(
    text: str | None,
    measured: Callable[[Images, Any], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    seeds: int = 0,
) -> None:
    """The same with options for the images, which `measured` is given too; `text`: of `--help`; `seeds`: by default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "digits"), default="cifar10")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--size", type=int, help="images that are trained on, at most")
    if seeds:
        parser.add_argument("--seeds", type=int, default=seeds, help=f"of each training (default: {seeds})")
    measure_or_show(parser, lambda chosen: measured(load_images(chosen.data, chosen.data_dir), chosen), table)


def trained(run: Run, data: Images, runs: Path | None = None) -> Result:
    """`runs`: a folder that keeps trainings, so that what was stopped goes on; None: nothing is kept."""
    if runs is not None:
        return train(run, data, runs)
    with TemporaryDirectory() as folder:
        return train(run, data, Path(folder))


def accuracies(result: Result) -> list[float]:
    """On held-out and on test images in %; those of guessing where the training did not end."""
    if result["outcome"] != "finished":
        return 2 * [PER_CENT * (1 - float(result["chance"]["error"]))]
    return [PER_CENT * (1 - float(result["curves"][part][-1])) for part in ("valid_error", "test_error")]


def best(rates: Sequence[dict[str, Any]]) -> str:
    """Accuracy on test images at the rate that held-out images choose; `rates`: each with the `accuracies` of seeds."""
    chosen = max(rates, key=lambda rate: fmean(held_out for held_out, _ in rate["scores"]))
    return "{:.1f} ± {:.1f} @ {:g}".format(*mean_and_error(test for _, test in chosen["scores"]), chosen["rate"])


@contextmanager
def changed_networks(change: Callable[[nn.Module], None]) -> Iterator[None]:
    """Networks of the lab are changed when they are new."""
    build = models._net

    def net(*given: Any) -> nn.Module:
        model = build(*given)
        change(model)
        return model

    with patch.object(models, "_net", net):
        yield
