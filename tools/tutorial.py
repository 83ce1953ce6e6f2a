"""Runs the tutorial, and makes a page of it.

    python tools/tutorial.py            runs examples/tutorial.ipynb, and writes it with its outputs, and the page
    python tools/tutorial.py --page     writes the page alone, from the outputs that are there

A small runner instead of a Jupyter server: the cells run one after the other in one namespace. What they print is their
output, and so is their last expression; a figure of matplotlib becomes a picture.
"""

import argparse
import ast
import base64
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from os.path import join, normpath, relpath
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples/tutorial.ipynb"
PAGE = ROOT / "docs/guide/tutorial.md"
Cell = dict[str, Any]
Outputs = list[dict[str, Any]]
LINK = re.compile(r"\]\(([^):#]+)\)")


def read(path: Path = NOTEBOOK) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def source(cell: Cell) -> str:
    """Without the lines that only Jupyter knows, such as %matplotlib."""
    return "".join(line for line in cell["source"] if not line.startswith("%"))


def run(notebook: dict[str, Any]) -> list[Outputs]:
    """The outputs of each cell of code."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [run_cell(source(cell), number, names) for number, cell in enumerate(cells, 1)]


def run_cell(text: str, number: int, names: dict[str, Any]) -> Outputs:
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with redirect_stdout(printed), redirect_stderr(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: Outputs = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": shown(value)}
        )
    return outputs


def shown(value: Any) -> dict[str, Any]:
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png", dpi=90, metadata={"Software": None})
        return {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["a figure"]}
    return {"text/plain": lines(repr(value))}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def with_outputs(notebook: dict[str, Any], outputs: list[Outputs]) -> dict[str, Any]:
    """The notebook with these outputs in the place of its own."""
    new, cells = iter(enumerate(outputs, 1)), []
    for cell in notebook["cells"]:
        number, found = next(new) if cell["cell_type"] == "code" else (0, [])
        cells.append(cell | {"execution_count": number, "outputs": found} if number else cell)
    return notebook | {"cells": cells}


def page_of(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by their names. Its code is marked: the tests run the notebook itself."""
    parts = ["<!-- made from examples/tutorial.ipynb by tools/tutorial.py -->"]
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(LINK.sub(moved, source(cell)))
            continue
        parts.append(f"```python notebook\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"tutorial-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![output of the cell above]({name})")
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def moved(link: re.Match[str]) -> str:
    """A link of the notebook as one of the page."""
    return f"]({relpath(normpath(join(NOTEBOOK.parent, link[1])), PAGE.parent)})"


def masked(outputs: list[Outputs]) -> list[list[str]]:
    """What is the same on every machine: the words, without the numbers."""
    texts = [["".join(each.get("text") or each["data"]["text/plain"]) for each in cell] for cell in outputs]
    return [[re.sub(r"\s+", " ", re.sub(r"-?\d[\d.e-]*", "#", text)) for text in cell] for cell in texts]


def write_page(notebook: dict[str, Any]) -> None:
    text, pictures = page_of(notebook)
    PAGE.write_text(text, encoding="utf-8")
    for name, content in pictures.items():
        (PAGE.parent / name).write_bytes(content)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--page", action="store_true", help="do not run it")
    notebook = read()
    if not options.parse_args().page:
        notebook = with_outputs(notebook, run(notebook))
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page(notebook)


if __name__ == "__main__":
    main()
