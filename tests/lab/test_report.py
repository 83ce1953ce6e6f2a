"""The page of results: one file that needs nothing else, that anyone can read, and that says what was found."""

import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from lab_results import result, results

from streamnorm.lab.claims import Verdict, judge
from streamnorm.lab.view.page import Html, html, tag
from streamnorm.lab.view.report import report, write_report

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'too' <!-- </table>"
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Elements with their attributes, the text outside of styles, and whether every element is closed in order."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.text, self.open, self.headings = [], "", [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        assert len(dict(attributes)) == len(attributes)
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if re.fullmatch("h[1-6]", name):
            self.headings.append(int(name[1]))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def all(self, name):
        return [attributes for found, attributes in self.elements if found == name]


def verdict(**fields):
    values = [0.5, 0.7, 0.6]
    standard = Verdict(
        "online", "a", "it is so", "figure 1", "reproduced", values, 0.6, 0.05, "nats", "quick", "online-quick"
    )
    return replace(standard, **fields)


@pytest.fixture(scope="module")
def full():
    outcomes = {"BN 1 x 32": ["refused"] * 3, "BN 2 x 16": ["finished", "diverged", "finished"]}
    found = [results("online", outcomes=outcomes), results("rnn", seeds=2), results("table")]
    return report(found, [claim for each in found for claim in judge(each)])


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without figures, for what does not depend on them: drawing takes most of the time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_it_needs_nothing_but_itself(full):
    page = Page(full)
    addresses = [element[name] for _, element in page.elements for name in ("src", "href", "srcset") if name in element]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in full
    assert "url(" not in full
    assert not page.all("script")


def test_it_can_be_read_by_anyone(full):
    page = Page(full)
    ids = Counter(element["id"] for _, element in page.elements if "id" in element)
    assert set(ids.values()) == {1}
    assert {a["href"][1:] for a in page.all("a")} <= set(ids)
    assert {s["aria-labelledby"] for s in page.all("section")} <= set(ids)
    assert all(len(image["alt"]) > 40 for image in page.all("img"))
    assert len(page.all("img")) == 3
    assert page.all("html") == [{"lang": "en"}]
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert all(th["scope"] in ("row", "col") for th in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert {"header", "nav", "main", "footer"} <= {name for name, _ in page.elements}


def test_it_says_what_was_found(full):
    text = Page(full).text
    for words in (
        "The paper: ",
        "cannot run",
        "1 of 3 diverged",
        "the run refused",
        "streamnorm run online",
        "A note.",
    ):
        assert words in text
    assert re.search(r"\d+ claims: \d+ reproduced, \d+ not reproduced, \d+ not enough evidence\.", text)
    assert re.search(r"\d+\.\d\d ± \d\.\d\d", text)


def test_what_was_varied_is_drawn_and_says_how_it_was_made():
    tried = [replace(results("rnn"), variation=each) for each in ({}, {"start": 2.0}, {"start": 8.0})]
    page = Page(report(tried, []))
    assert len(page.all("img")) == 2  # the figure, and its claims against the start
    assert any("start x 2 (3)" in image["alt"] for image in page.all("img"))
    assert page.text.count(f"{tried[1].command}; {len(tried[1].runs)} runs, ") == 2


@pytest.mark.usefixtures("undrawn")
def test_it_says_how_rates_were_chosen():
    each = "; the paper's rates, the same for every norm, none tuned here."
    images, text = "0.1 (25), then 0.01 (5)", "0.01 (2), then 0.001 (1)"
    for name, told in (("online", images), ("rnn", text), ("table", f"{images} or {text}")):
        assert f"Learning rate (epochs): {told}{each}" in Page(report([results(name)], [])).text


@pytest.mark.usefixtures("undrawn")
def test_outcomes_are_counted_and_have_a_word_and_a_sign():
    kinds = ["reproduced", "reproduced", "not reproduced", "not enough evidence"]
    claims = [verdict(outcome=kind, name=str(i)) for i, kind in enumerate(kinds)]
    text = Page(report([results("online")], claims)).text
    assert "4 claims: 2 reproduced, 1 not reproduced, 1 not enough evidence." in text
    assert all(words in text for words in ("✓ reproduced", "✗ not reproduced", "? not enough evidence"))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "+0.600 ± 0.050"),
        ({"mean": -12.34, "error": 3.2}, "\N{MINUS SIGN}12.3 ± 3.2"),
        ({"values": [0.5], "mean": 0.5, "error": math.nan}, "+0.500nats, 1 seed"),
        ({"values": [], "mean": math.nan, "error": math.nan}, "no seeds"),
        ({"values": [math.inf, -1.0], "mean": math.inf, "error": math.nan}, "+inf"),
        ({"values": [math.nan, 1.0], "mean": math.nan, "error": math.nan}, "no number"),
        ({"error": 0.0}, "+0.600 ± 0.000"),
        ({"file_name": "not among the results"}, "it is so"),
    ],
)
def test_numbers_of_a_claim(fields, shown):
    assert shown in Page(report([results("online")], [verdict(**fields)])).text


def test_settings_are_complete_and_shared_ones_stand_once(full):
    section = full[full.index('id="figure-online-quick"') : full.index('id="figure-rnn-quick"')]
    text = Page(section[section.index("<details") : section.index("</details>") + len("</details>")]).text
    for name in result(results("lp").figure.curves[0].run)["settings"]:
        assert name in text
    assert text.count("optimizer") == 1
    assert "[0, 1, 2]" in text


def test_everything_is_escaped():
    found = results("online", note=HOSTILE, command=HOSTILE, data=HOSTILE, scale=HOSTILE)
    figure = replace(found.figure, title=HOSTILE, caption=HOSTILE, paper=HOSTILE)
    curves = {HOSTILE: [run | {"message": HOSTILE, "id": HOSTILE} for run in found.curves["LN 32 x 1"]]}
    found = replace(found, figure=figure, curves=curves)
    claim = verdict(text=HOSTILE, paper=HOSTILE, unit=HOSTILE, outcome=HOSTILE, file_name=found.file_name)
    source = report([found], [claim])
    page = Page(source)
    assert "<script" not in source
    assert page.text.count(HOSTILE) > 10
    assert HOSTILE in page.all("img")[0]["alt"]


def test_only_markup_is_not_escaped():
    assert html("<b>") == "&lt;b&gt;"
    assert html(Html("<b>")) == "<b>"
    assert tag("a", "x < y", href='"', aria_label="&") == '<a href="&quot;" aria-label="&amp;">x &lt; y</a>'


@pytest.mark.usefixtures("undrawn")
def test_results_of_one_figure_have_sections_of_their_own():
    found = [results("online", scale=scale) for scale in ("smoke", "quick", "smoke.", "smoke ")]
    ids = [section["aria-labelledby"] for section in Page(report(found, [])).all("section")]
    assert len(set(ids)) == 5


def test_without_results_it_says_how_to_get_some(tmp_path):
    path = tmp_path / "folder" / "report.html"
    write_report([], [], path)
    text = Page(path.read_text(encoding="utf-8")).text
    assert "no results yet" in text
    assert "streamnorm run " in text


def test_curves_without_runs_and_runs_without_rows():
    found = results("online", outcomes={"LN 32 x 1": [], "BN 1 x 32": ["refused"], "BN 2 x 16": ["diverged"]})
    assert "no results" in Page(report([found, replace(found, scale="other", curves={})], [])).text


@pytest.mark.usefixtures("undrawn")
def test_without_matplotlib_the_numbers_are_there():
    page = Page(report([results("online")], []))
    assert not page.all("img")
    assert 'pip install "streamnorm[lab]"' in page.text


# A window is at least 500 wide, a frame is not: the page in the frame tells its width, and the browser dumps it.
MEASURE = """<script>addEventListener("load", () =>
    parent.postMessage(document.documentElement.scrollWidth + " of " + innerWidth, "*"))</script></body>"""
FRAME = """<script>addEventListener("message", (event) => document.body.append(event.data))</script>
    <iframe src="page.html" width="360" height="640"></iframe>"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=5000 --dump-dom"
)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_phone_needs_no_sideways_scrolling(full, tmp_path):
    policy = re.compile("<meta http-equiv.*?>")  # it would forbid the script
    page = policy.sub("", full).replace("<details>", "<details open>").replace("</body>", MEASURE)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME, encoding="utf-8")
    command = ["chromium", *FLAGS.split(), f"--user-data-dir={tmp_path / 'user'}", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    width, view = map(int, re.search(r"(\d+) of (\d+)", shown).groups())
    assert 340 < view <= 360
    assert width <= view
