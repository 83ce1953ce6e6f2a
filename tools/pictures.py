"""Draws the pictures of the documents again, from the results that are committed.

python tools/pictures.py               all of them: docs/results, benchmarks/results
python tools/pictures.py compare-      those of the files of results whose names begin so
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamnorm.lab.compared import read_compared
from streamnorm.lab.online import read_online
from streamnorm.lab.results import FigureResults, read_results
from streamnorm.lab.view.findings import groups
from streamnorm.lab.view.panels import draw_grid
from streamnorm.lab.view.plot import draw
from streamnorm.lab.view.varied import draw_varied
from streamnorm.lab.view.versus import draw_compared

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
GRIDS = ("fully-connected", "recurrent", "convolutional", "convolutional-recurrent")
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


def pictures(start: str) -> Iterator[Path]:
    """Draws what begins with `start`, and says what it drew."""
    found: list[FigureResults] = []
    for path in sorted(RESULTS.glob(f"{start}*.json")):
        if path.stem.startswith("compare-"):
            yield from draw_compared(read_compared(path), RESULTS)
        elif path.stem.removeprefix("online-") in GRIDS:
            yield from draw_grid(read_online(path), RESULTS)
        else:
            yield from draw(read_results(path), RESULTS)
            found.append(read_results(path))
    for group in groups(found):
        yield from draw_varied(group, RESULTS)
    for script, folder in (("online_stream", RESULTS / "streams"), ("stream_q", RESULTS / "reinforcement")):
        if folder.name.startswith(start):
            __import__(script).draw(content(folder / "results.json"), folder / "curves.svg")
            yield folder / "curves.svg"
    measured = ROOT / "benchmarks/results"
    if "results".startswith(start):
        __import__("plot").draw(content(measured / "results.json"), measured)
        yield measured


def content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("start", nargs="?", default="", help="of the names of results, such as compare-")
    for path in pictures(options.parse_args().start):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
