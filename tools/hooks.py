"""What the site needs beside the pages: files from outside of docs/, links to them, and words of the glossary."""

import re
from functools import cache
from html import escape
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
# Pages from outside of docs/, and where they are on the site. Other files that a page links to are in files/.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "CHANGELOG.md": "design/changelog.md",
    "benchmarks/results/results.md": "measured/table.md",
}
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *```\w+) \w+$", re.MULTILINE)  # a word for the tests, which Markdown does not know
GLOSSARY = "reference/glossary.md"
# Where a norm is folded into the layer before it, which is another fold than that of the glossary.
FUSING = ("guide/convert.md", "guide/tutorial.md", "guide/weight_standardization.md", "reference/api/models.md")
NUMBER = re.compile(r"<td>(?=[-+]?\d[^<]{0,24}</td>)")  # with unit, error, rate: it should not be broken
SILENT = re.compile(r"<(/?)(?:a|code|pre|h\d|script|style|svg)\b")  # in these no word becomes a link
TERM = re.compile(r"\| <a id=\"([\w-]+)\"></a>\*\*(.+?)\*\* \| (.+) \|")


def on_files(files: Files, config: Any) -> Files:
    for source, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        for _, _, target, _ in LINK.findall(page.content_string):
            path = target_of(target, source_of(page.src_uri))
            place = place_of(path)
            if place.startswith("files/") and (ROOT / path).is_file() and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    here = page.file.src_uri
    return LINK.sub(lambda link: moved(link, here), FENCE.sub(r"\1", markdown))


# Links


def source_of(place: str) -> str:
    """The file in the repository that a page of the site is made from."""
    return next((source for source, each in PAGES.items() if each == place), DOCS + place)


def place_of(path: str) -> str:
    """Where a file of the repository is on the site, which has no names that begin with a dot."""
    if path in PAGES or path.startswith(DOCS):
        return PAGES.get(path, path.removeprefix(DOCS))
    return "files/" + re.sub(r"(^|/)\.", r"\1", path)


def target_of(target: str, source: str) -> str:
    """What a link in the file `source` leads to, in the repository."""
    return target if not target or ":" in target else normpath(join(dirname(source), target))


def moved(link: re.Match[str], here: str) -> str:
    """A link of the repository as one of the page `here`; a folder has no page, and is named without a link."""
    picture, words, target, anchor = link.groups(default="")
    path = target_of(target, source_of(here))
    if not path or ":" in path:
        return link[0]
    if (ROOT / path).is_dir():
        return words
    return f"{picture}[{words}]({relpath(place_of(path), dirname(here) or '.')}{anchor})"


# Words that nobody knows from elsewhere


def on_page_content(html: str, page: Page, **others: Any) -> str:
    """The first use of a word in a section leads to the glossary, and has its meaning as a tooltip."""
    html = NUMBER.sub('<td class="number">', html)
    here = page.file.src_uri
    if here == GLOSSARY:
        return html
    glossary = relpath(GLOSSARY.replace(".md", ".html"), dirname(here) or ".")
    meanings = {word: meaning for word, meaning in terms().items() if here not in FUSING or meaning[0] != "fold"}
    word = re.compile(rf"(?<![\w.`=])(?:{'|'.join(sorted(meanings, key=len, reverse=True))})(?![\w=])")
    met: set[str] = set()

    def linked(match: re.Match[str]) -> str:
        anchor, meaning = meanings[match[0]]
        if anchor in met:
            return match[0]
        met.add(anchor)
        return f'<a class="term" href="{glossary}#{anchor}" title="{escape(meaning)}">{match[0]}</a>'

    parts, inside = re.split(r"(<[^>]+>)", html), 0
    for i, part in enumerate(parts):
        if part.startswith("<h2"):
            met.clear()
        if tag := SILENT.match(part):
            inside += -1 if tag[1] else 1
        elif not part.startswith("<") and not inside:
            parts[i] = word.sub(linked, part)
    return "".join(parts)


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Each form of each word: its anchor in the glossary, and what it means."""
    found: dict[str, tuple[str, str]] = {}
    for anchor, words, meaning in TERM.findall((ROOT / DOCS / GLOSSARY).read_text(encoding="utf-8")):
        plain = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", meaning).replace("`", "").replace("*", "")
        found |= dict.fromkeys(words.split(", "), (anchor, plain))
    return found
