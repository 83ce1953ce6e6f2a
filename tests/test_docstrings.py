"""Every public name is explained: its arguments, its shapes, and an example, which runs as a doctest."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest
from docstrings import arguments, completed, sections, shape
from torch import nn

import streamnorm
from streamnorm import backends, functional

API = Path(__file__).parent.parent / "docs/reference/api"
PUBLIC = {
    **{f"streamnorm.{name}": getattr(streamnorm, name) for name in streamnorm.__all__ if name != "__version__"},
    **{f"streamnorm.functional.{name}": getattr(functional, name) for name in functional.__all__},
    **{f"streamnorm.backends.{name}": getattr(backends, name) for name in ("available", "explain", "use")},
}
PUBLIC = {path: each for path, each in PUBLIC.items() if not isinstance(each, ModuleType)}
SHAPED = {path for path, each in PUBLIC.items() if inspect.isclass(each) and issubclass(each, nn.Module)}
SHAPED |= {"streamnorm.functional.streaming_norm", "streamnorm.functional.new_state"}


def docstring(path):
    """Of a class its own; of an object that is called, that of its call."""
    each = PUBLIC[path]
    return inspect.getdoc(each if inspect.isroutine(each) or inspect.isclass(each) else type(each).__call__)


def lookup(name):
    return next(docstring(path) for path in PUBLIC if path.endswith(f".{name}"))


@pytest.mark.parametrize("path", PUBLIC)
def test_arguments_shapes_and_an_example(path):
    text = docstring(path)
    described = arguments(text, lookup)
    assert set(described) == set(inspect.signature(PUBLIC[path]).parameters)
    assert all(len(words) > 3 for words in described.values())
    assert ">>>" in sections(text)["Example"]
    if path in SHAPED:
        assert all(line.startswith(("- ", "  ")) for line in shape(text, lookup).splitlines())
        assert "`(" in shape(text, lookup)


def test_the_reference_has_every_public_name_once_and_no_other():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    shown = [line.split()[1] for line in pages.splitlines() if line.startswith(":::")]
    shown = ["streamnorm.convert" if path == "streamnorm.convert.convert.convert" else path for path in shown]
    assert sorted(shown) == sorted(PUBLIC)
    overview = (API.parent / "index.md").read_text(encoding="utf-8")
    assert [path for path in PUBLIC if f"`{path.rpartition('.')[2]}`" not in overview] == []


def test_what_is_described_elsewhere_is_shown_here():
    text = completed(docstring("streamnorm.LSTM"), lookup)
    assert "    hidden_size: the number of features of the hidden state." in text
    assert "    cell_norm: whether there is a norm on c_t inside the last tanh." in text
    assert "**Shape:**\n\n- input: `(T, N, input_size)`" in text
    assert "- hx and the final state are pairs `(h, c)`." in text
    assert "Examples:\n    >>> output, (h_n, c_n)" in text
    assert "as in `RNN`" not in text


def test_settings_that_are_all_described_elsewhere_are_not_repeated():
    text = docstring("streamnorm.LazyStreamingNorm")
    assert "kappa" in arguments(text, lookup)
    assert "num_features" not in arguments(text, lookup)
    assert "**Arguments:** all settings: as in `StreamingNorm`." in completed(text, lookup)
