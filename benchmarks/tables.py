"""What benchmarks with one table share: it is measured and may be written, or what was written is shown."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
