"""`make test-integrations`: every model of the zoo is examined, and docs/measured/models.md is written.

What was examined before is not done again, unless streamnorm, the checks, or the versions are others: a run that was
stopped goes on where it was.
"""

import argparse
import hashlib
import json
import logging
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch
from integrations.examine import examine, said
from integrations.page import failures, page
from integrations.zoo import LIBRARIES, models_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = [*sorted((ROOT / "src/streamnorm").rglob("*.py")), HERE / "examine.py", HERE / "zoo/__init__.py"]


def main(arguments=None):
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # of libraries, about settings that are unusual
    libraries = options.library or LIBRARIES
    lost: list[str] = []
    rows = [row for library in libraries for row in examined(library, options, lost)]
    versions = {name: metadata.version(name) for name in ("torch", *libraries)}
    results = {"versions": {"python": platform.python_version(), **versions}, "rows": rows}
    if not options.library and not options.only:
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        options.page.write_text(page(results), encoding="utf-8")
    failed = [*lost, *failures(rows)]
    print("".join(f"{line}\n" for line in failed), end="")
    print(f"{len(rows) + len(lost)} models, {len({line.partition(': ')[0] for line in failed})} with a failure")
    return 1 if failed or not rows else 0


def examined(library, options, lost):
    """The rows of a library, from the cache where they are there; `lost` gets models that cannot be built."""
    for model in models_of(library):
        if options.only not in model.name:
            continue
        file = options.cache / f"{library}-{model.name.replace(', ', '-').replace(' ', '-')}.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known = found.get("key") == key(library)
        if not known:
            try:
                found = {"key": key(library), "row": examine(model)}
            except Exception as error:  # of the library, of other versions than the zoo was written for
                lost.append(f"{library} {model.name}: cannot be built: {said(error)}")
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{library} {model.name}: {'known' if known else 'examined'}", file=sys.stderr, flush=True)
        yield found["row"]


def key(library):
    """What a row depends on."""
    hashed = hashlib.sha256()
    for path in [*SOURCES, HERE / f"zoo/of_{library}.py"]:
        hashed.update(path.read_bytes())
    for name in ("torch", library):
        hashed.update(metadata.version(name).encode())
    return hashed.hexdigest()


def parser():
    new = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    new.add_argument("--library", action="append", help="only models of this one; the page is not written")
    new.add_argument("--only", default="", help="only models whose name has this; the page is not written")
    new.add_argument("--cache", type=Path, default=ROOT / "build/models")
    new.add_argument("--results", type=Path, default=HERE / "models.json")
    new.add_argument("--page", type=Path, default=ROOT / "docs/measured/models.md")
    return new


if __name__ == "__main__":
    sys.exit(main())
