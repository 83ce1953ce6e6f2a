"""What files of results must look like, as data: whoever reads one checks it once, and all else can rely on it."""

import math
from typing import Any


def fit(value: Any, shape: Any, at: str = "it") -> None:
    """Raise a ValueError that says where `value`, as JSON has it, is not of `shape`.

    A shape is a type (`float`: any finite number), None, a tuple of shapes to choose from, `[shape]` for a list,
    `{str: shape}` for a dictionary of any names, `{"name": shape}` for one that has at least these.

    >>> fit({"curves": {"loss": [1, "two"]}}, {"curves": {str: [float]}})
    Traceback (most recent call last):
    ValueError: curves.loss[1] must be a number
    """
    if isinstance(shape, tuple):
        if not any(_fits(value, each) for each in shape):
            raise ValueError(f"{at} must be {' or '.join(map(_word, shape))}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{at} must be a list")
        for i, each in enumerate(value):
            fit(each, shape[0], f"{at}[{i}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{at} must be a dictionary")
        within = "" if at == "it" else f"{at}."
        for name in value if str in shape else shape:
            if name not in value:
                raise ValueError(f"{within}{name} is missing")
            fit(value[name], shape.get(name, shape.get(str)), f"{within}{name}")
    elif not _is(value, shape):
        raise ValueError(f"{at} must be {_word(shape)}")


def _fits(value: Any, shape: Any) -> bool:
    try:
        fit(value, shape)
    except ValueError:
        return False
    return True


def _is(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _word(shape: Any) -> str:
    return {None: "null", float: "a number", int: "a whole number", str: "a text"}.get(shape, str(shape))


VERSIONS = {str: str}
RUN = {
    "id": str,
    "settings": {
        "net": str,
        "norm": {},
        "samples": int,
        "batches": int,
        "evaluate": int,
        "seed": int,
        "rates": [[float]],
    },
    "data": str,
    "outcome": str,
    "message": str,
    "curves": {str: [(float, None)]},
    "chance": {"loss": float},
    "parameters": int,
    "updates": int,
    "seconds": float,
    "threads": int,
    "versions": VERSIONS,
}
FIGURE = {"figure": str, "scale": str, "data": [str], "note": str, "command": str, "curves": {str: [RUN]}}
GRID = {
    "net": str,
    "samples": [int],
    "batches": [int],
    "rates": [float],
    "seeds": int,
    "size": int,
    "data": str,
}
# What files of many runs say of them, beside the runs.
ROWS = {
    "note": str,
    "fingerprint": str,
    "versions": [VERSIONS],
    "chance": {"loss": float, "error": float},
    "columns": [str],
}
ONLINE = ROWS | {"grid": GRID, "norms": [str], "runs": [[(float, None, str, [int])]]}
PLAN = {"net": str, "sizes": [[int]], "norms": [str], "seeds": int, "size": (int, None), "data": str}
COMPARED = ROWS | {"plan": PLAN, "runs": [[(float, None, str)]]}
OUTCOMES = ("finished", "diverged", "refused")


def fit_device(fields: dict[str, Any], at: str) -> None:
    """The same for a device among them, which is told only where it is not the default."""
    fit({"device": ""} | fields, {"device": str}, at)


def fit_run(run: Any, at: str = "it") -> None:
    """The same for the result of one run, whose curves have as many rows each."""
    fit(run, RUN, at)
    curves, settings = run["curves"], run["settings"]
    fit_device(settings, f"{at}.settings")
    kinds = ["loss"] if settings["net"] in ("rnn", "gru") else ["loss", "error"]
    fit(run["chance"], dict.fromkeys(kinds, float), f"{at}.chance")
    if any(len(each) != 2 for each in settings["rates"]):
        raise ValueError(f"{at}.settings.rates must be pairs of a learning rate and epochs")
    if run["outcome"] not in OUTCOMES or settings["evaluate"] < 1:
        raise ValueError(f"{at}.outcome must be one of {', '.join(OUTCOMES)}, {at}.settings.evaluate 1 or more")
    if not curves and run["outcome"] != "finished":
        return
    ended = run["outcome"] == "finished"
    measured = {f"{part}_{kind}": [float if ended else (float, None)] for part in ("train", "test") for kind in kinds}
    fit(curves, {"epoch": [float]} | measured, f"{at}.curves")
    epochs = curves["epoch"]
    if not epochs or {len(curve) for curve in curves.values()} != {len(epochs)}:
        raise ValueError(f"{at}.curves must have as many rows each, and one at least")
    if any(b <= a for a, b in zip([0.0, *epochs], epochs, strict=False)):
        raise ValueError(f"{at}.curves.epoch must rise")


def fit_figure(content: Any) -> None:
    """The same for the results of a figure."""
    fit(content, FIGURE)
    fit(content.get("variation", {}), {str: (float, str)}, "variation")
    if not content["curves"]:
        raise ValueError("curves has none")
    for label, runs in content["curves"].items():
        if not runs:
            raise ValueError(f"curves.{label} has no run")
        for i, run in enumerate(runs):
            fit_run(run, f"curves.{label}[{i}]")
