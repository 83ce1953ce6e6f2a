"""The parts of a page that needs nothing but itself: markup that cannot forget to escape, and how it looks."""

import base64
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup. Every other string is text, and is escaped where it enters the page."""

    __slots__ = ()


def html(value: object) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, *contents: object, **attributes: object) -> Html:
    """An element. A trailing underscore of an attribute is dropped, others become hyphens."""
    named = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items())
    return Html(f"<{name}{named}>{join(contents)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(escape(between).join(html(part) for part in parts))


def link(target: str, text: object) -> Html:
    return tag("a", text, href=f"#{target}")


def table(caption: str, heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls by itself where the page is too narrow for it. The first cell of a row is its heading."""
    head = tag("tr", *(tag("th", each, scope="col") for each in heads))
    body = (tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest)) for first, *rest in rows)
    whole = tag("table", tag("caption", tag("span", caption)), tag("thead", head), tag("tbody", *body))
    return scrolling(caption, whole)


def scrolling(name: str, content: Html) -> Html:
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def picture(svg: bytes, alt: str) -> Html:
    source = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return scrolling("drawing", Html(f'<img src="{source}" alt="{escape(alt)}">'))


def terms(pairs: Iterable[tuple[object, object]]) -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def folded(summary: str, *contents: object) -> Html:
    return tag("details", tag("summary", summary), *contents)


def page(title: str, opening: Html, main: Html) -> str:
    return SHELL.format(title=escape(title), style=STYLE, opening=opening, main=main)


# The policy lets the page load nothing: it is the same page without a network, and tells nobody that it was read.
SHELL = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1 id="top">{title}</h1>
{opening}
</header>
<main id="main" tabindex="-1">
{main}
</main>
<footer><a href="#top">Back to the top</a></footer>
</body>
</html>
"""

# Drawings are black on white; in the dark they are inverted, and turned back to their hues.
STYLE = """
:root { --page: #fff; --ink: #1a1a1a; --soft: #555; --line: #d4d4d4; --shade: #f5f5f5; --link: #0550ae;
  --good: #0a6b2d; --bad: #a01c1c; --open: #6a5300 }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #121212; --ink: #e8e8e8; --soft: #aaa; --line: #3c3c3c; --shade: #1e1e1e; --link: #8ab8ff;
    --good: #7ad394; --bad: #ff9c94; --open: #e3c25c }
  img { filter: invert(.93) hue-rotate(180deg) }
}
* { box-sizing: border-box }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; -webkit-text-size-adjust: 100% }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto } }
body { margin: 0 auto; max-width: 64rem; padding: 1rem 1.25rem 3rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .6rem 0 }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 3rem 0 .4rem; padding-top: .8rem;
  border-top: 2px solid var(--line) }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p, dd { max-width: 46rem }
a { color: var(--link) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
main:focus { outline: none }
.skip { position: absolute; left: -100vw; padding: .5rem 1rem; background: var(--page) }
.skip:focus { left: 1rem; top: .5rem; z-index: 1 }
nav ul { list-style: none; margin: .5rem 0; padding: 0; columns: 20rem; column-gap: 2rem }
nav li { padding: .2rem 0; break-inside: avoid }
.lead, .summary { font-size: 1.1rem }
.summary { font-weight: 600 }
.paper { margin: .8rem 0; padding: .1rem 0 .1rem 1rem; border-left: 4px solid var(--line); color: var(--soft) }
.scroll { overflow-x: auto; margin: .6rem 0 }
.scroll img { display: block; width: 100%; min-width: 34rem; height: auto }
table { border-collapse: collapse; min-width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding: .2rem 0 .4rem; color: var(--soft) }
caption span { display: inline-block; position: sticky; left: 0; max-width: min(46rem, 100vw - 2.5rem) }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line) }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom }
tbody th { font-weight: 600; min-width: 8.5rem }
.wide { display: inline-block; min-width: 15rem; font-weight: 400; text-wrap: pretty }
.keep, .outcome { white-space: nowrap }
.outcome { font-weight: 600 }
.good { color: var(--good) } .bad { color: var(--bad) } .open { color: var(--open) }
small { color: var(--soft); font-size: .88em }
dl div { display: flex; flex-wrap: wrap; gap: 0 .8rem; padding: .15rem 0 }
dt { color: var(--soft); flex: 0 0 8rem }
dd { margin: 0; flex: 1 1 16rem; min-width: 0; overflow-wrap: anywhere }
code { font: .9em ui-monospace, monospace; background: var(--shade); padding: .1em .3em; border-radius: 3px;
  overflow-wrap: anywhere }
details { margin: .8rem 0; border: 1px solid var(--line); border-radius: 6px; padding: 0 .9rem }
summary { padding: .55rem 0; cursor: pointer; font-weight: 600 }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 2px solid var(--line) }
@media (max-width: 30rem) {
  .wide { min-width: 9rem }
  .outcome { white-space: normal }
}
@media print {
  body { max-width: none; padding: 0; font-size: 9.5pt }
  nav, footer, .skip { display: none }
  a { color: inherit; text-decoration: none }
  .scroll { overflow: visible }
  .scroll img { min-width: 0 }
  table { font-size: 8pt }
  th, td { padding-right: .5rem }
  .wide { min-width: 9rem }
  tr, .scroll:has(img) { break-inside: avoid }
  h2, h2 ~ p, h3, caption, summary { break-after: avoid }
  details::details-content { content-visibility: visible; block-size: auto }
}
"""
