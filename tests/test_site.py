"""The site: built without a warning, links that lead somewhere, no network, and a browser that finds its way."""

import json
import queue
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from posixpath import dirname, join, normpath
from urllib.parse import quote, unquote, urlencode

import pytest
from makefile import ROOT, has_make, recipe, run_line

pytest.importorskip("mkdocs", reason="needs the group docs")
PROBE = ROOT / "tests/files/site_probe.js"
SILENT = {"a", "code", "pre", "script", "style", "svg", "title", "nav", *(f"h{i}" for i in range(1, 7))}
FIRST = ("index.html", "quickstart.html", "guide/index.html", "guide/tutorial.html")  # what a newcomer reads


class Page(HTMLParser):
    """Of one page: its anchors, what it links to and loads, and its words outside of code, links and headings."""

    VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"])

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded, self.words, self.inside = set(), [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        self.loaded += [found[name] for name in ("src", "data") if found.get(name)]
        self.loaded += [found["href"]] if tag == "link" and found.get("rel") != "canonical" else []
        if tag not in self.VOID:
            self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not SILENT.intersection(self.inside):
            self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    (line,) = recipe("docs") if has_make else ["NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict"]
    done = run_line(line, "--site-dir", folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return {name: Page((site / name).read_text(encoding="utf-8")) for name in found}


def test_every_shelf_is_there(pages):
    shelves = (
        "index",
        "quickstart",
        "faq",
        *(f"{name}/index" for name in ("guide", "reference", "measured", "design")),
    )
    assert {f"{name}.html" for name in shelves} <= set(pages)
    assert {"design/contributing.html", "reference/glossary.html", "guide/troubleshooting.html"} <= set(pages)
    assert len(pages) > 40


def test_every_link_leads_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if ":" in target or name == "404.html":
                continue
            place = normpath(join(dirname(name), target)) if target else name
            assert (site / place).is_file(), (name, link)
            if anchor and place in pages and not anchor.startswith("__"):
                assert anchor in pages[place].ids, (name, link)


def test_lists_and_tables_are_what_they_should_be(site, pages):
    """Markdown of a site is stricter than that of a repository: no list or table has become a part of something."""
    for name in pages:
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", (site / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"<t[dh][^>]*>\s*- |<p>[^<]*\n- |\|\s*-{3}|\*\*\w|\]\(\w|```", text), name


def test_nothing_is_loaded_from_the_network(site, pages):
    for name, page in pages.items():
        assert [each for each in page.loaded if re.match(r"(https?:)?//", each)] == [], name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path


def test_strange_words_lead_to_the_glossary(pages):
    """Whoever meets BA1, H1, fold or kappa can look it up there and then; the first pages do without."""
    from hooks import FUSING, terms

    assert {"BA1", "H1", "fold", "kappa", "s_hat"} <= set(terms())
    met = 0
    for name, page in pages.items():
        links = {link.partition("#")[2] for link in page.links if "glossary.html#" in link}
        links |= {"fold"} if name.replace(".html", ".md") in FUSING else set()
        text = " ".join(page.words)
        for word, (anchor, _) in terms().items():
            if re.search(rf"(?<![\w.`=]){word}(?![\w=])", text) and name != "reference/glossary.html":
                assert anchor in links, (name, word)
                met += 1
        if name in FIRST:
            assert not links - {"fold"} & {anchor for anchor, _ in terms().values()}, name
    assert met > 30


# In a browser

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-port=0"
)
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")


class Server(ThreadingHTTPServer):
    """The site on a plain local server, which also takes what the browser has to tell."""

    def __init__(self, folder):
        self.told = queue.Queue()
        super().__init__(("127.0.0.1", 0), lambda *call: Handler(*call, directory=str(folder)))
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(SimpleHTTPRequestHandler):
    def do_POST(self):
        self.server.told.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


def seen_by_browser(site, folder, by_file, **asked):
    """What `site_probe.js` reports of the home page, opened as a file or from a server."""
    page = (site / "index.html").read_text(encoding="utf-8")
    script = f"<script>{PROBE.read_text(encoding='utf-8')}</script></body>"
    (site / "probe.html").write_text(page.replace("</body>", script), encoding="utf-8")
    with Server(site) as server:
        start = (site / "probe.html").as_uri() if by_file else f"{server.url}/probe.html"
        words = urlencode(asked | {"to": f"{server.url}/told"}, quote_via=quote)
        command = ["chromium", *FLAGS.split(), f"--user-data-dir={folder / 'user'}", f"{start}?{words}"]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            seen = json.loads(server.told.get(timeout=120))
        finally:
            browser.terminate()
            browser.wait(timeout=30)
            server.shutdown()
            (site / "probe.html").unlink()
    assert "error" not in seen, seen
    return seen


@needs_browser
def test_search_works_for_a_page_that_was_opened_as_a_file(site, tmp_path):
    found = seen_by_browser(site, tmp_path, by_file=True, words="DecoupledUpdate")["found"]
    assert any("reference/api/training.html" in each["link"] for each in found)


@needs_browser
def test_a_reader_finds_the_way(site, pages, tmp_path):
    """By tabs and menus, by an anchor, by the search; no page is wider than a phone, and all can be read."""
    shown = [name for name in pages if name != "404.html"]
    path = ["Guide", "Basics", "Reference", "Norms", "Measured", "What it costs"]
    seen = seen_by_browser(
        site,
        tmp_path,
        by_file=False,
        words="padding mask",
        pages=json.dumps(shown),
        path=json.dumps(path),
        anchor="#memory",
    )
    assert [place for _, place, _ in seen["steps"]] == [
        *("/guide/index.html", "/guide/basics.html", "/reference/index.html", "/reference/api/norms.html"),
        *("/measured/index.html", "/measured/speed.html"),
    ]
    assert seen["steps"][-1][2].startswith("What it costs")
    assert -50 < seen["anchor"] < 300
    assert any("guide/basics.html" in each["link"] for each in seen["found"])
    assert [page for page, (width, view) in seen["widths"].items() if width > view] == []
    assert len(seen["widths"]) == len(shown)
    assert min(seen["contrast"].values()) >= 4.5
