"""What benchmarks with one table share: it is measured and may be written, or what was written is shown."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from streamnorm.lab.data import Images, load_images
from streamnorm.lab.store import read_json, write_json


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
    text: str | None, measured: Callable[[Images, int | None], dict[str, Any]], table: Callable[[dict[str, Any]], str]
) -> None:
    """The same with options for the images; `text`: of `--help`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "digits"), default="cifar10")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 is")
    parser.add_argument("--size", type=int, help="images that are trained on, at most")
    measure_or_show(parser, lambda chosen: measured(load_images(chosen.data, chosen.data_dir), chosen.size), table)
