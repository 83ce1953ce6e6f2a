"""The tutorial: its cells run and say what is committed, and the page is made of it."""

import ast
import re

import tutorial


def test_it_runs_and_says_the_same(tmp_path, monkeypatch):
    """In the same words; numbers may differ between machines, and the code itself asserts what must hold."""
    monkeypatch.chdir(tmp_path)
    notebook = tutorial.read()
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = tutorial.run(notebook)
    assert tutorial.masked(found) == tutorial.masked(cells)
    with_batch_norm, silent, streaming, updated = (
        float(re.search(r"[\d.]+", "".join(output["data"]["text/plain"]))[0])
        for outputs in found
        for output in outputs
        if "%" in "".join(output.get("data", {}).get("text/plain", ""))
    )
    assert silent < 75 < 90 < min(with_batch_norm, streaming, updated)


def test_the_page_is_that_of_the_notebook():
    text, pictures = tutorial.page_of(tutorial.read())
    assert tutorial.PAGE.read_text(encoding="utf-8") == text, "python tools/tutorial.py --page writes it"
    assert pictures
    for name, content in pictures.items():
        assert (tutorial.PAGE.parent / name).read_bytes() == content


def test_it_is_a_notebook_as_jupyter_has_it():
    notebook = tutorial.read()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert set(cell) - {"outputs", "execution_count"} == {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            ast.parse(tutorial.source(cell))
