"""Where pip of this Python looks for packages, and the files of a project there. No host name is written here."""

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.machinery import PathFinder
from urllib.parse import urldefrag, urljoin, urlsplit, urlunsplit

from ..errors import DataError
from .download import opened, read_page, shown

JSON = "application/vnd.pypi.simple.v1+json"
find_spec = PathFinder.find_spec  # on the path alone: finders of other packages may warn
ACCEPT = f"{JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


def locate(project: str, filename: str, sha256: str) -> tuple[str, str | None]:
    """The address of a project's file on the first index that has it, and the certificates pip is told to trust."""
    settings = pip_settings()
    failures = []
    for index in indexes(settings):
        try:
            links = files_of(project, index, settings.get("cert"))
            if filename not in links:
                raise DataError(f"{shown(index)} has no {filename}")
            url, stated = links[filename]
            if stated not in (None, sha256):
                raise DataError(f"{shown(index)} states sha256 {stated} for {filename}, must be {sha256}")
        except DataError as error:
            failures.append(str(error))
        else:
            return url, settings.get("cert")
    raise DataError("; ".join(failures))


def pip_settings() -> dict[str, str]:
    """pip's own settings, from its files and the environment; those for everything give way to more special ones."""
    found: dict[str, str] = {}
    lines = _pip("config", "list").splitlines()
    for section in ("global", "download", ":env:"):
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                found[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return found


def indexes(settings: dict[str, str]) -> list[str]:
    """The index, then the further ones. Unless it was set, pip's help has the one that pip comes with."""
    first = settings.get("index-url")
    if first is None:
        default = re.search(r"--index-url.*?\(default:?\s+(\S+?)\)", _pip("download", "--help"), re.DOTALL)
        first = default.group(1) if default else None
    return [index for index in (first, *settings.get("extra-index-url", "").split()) if index]


def _pip(*arguments: str) -> str:
    command = [*([sys.executable, "-m"] if find_spec("pip") else []), "pip", *arguments]
    environment = {**os.environ, "COLUMNS": "1000", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=60, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError("there is no working pip to ask for a package index") from error
    return done.stdout


def files_of(project: str, index: str, cafile: str | None = None) -> dict[str, tuple[str, str | None]]:
    """File name -> (address, sha256 if stated) of a project, from the simple API in either of its forms."""
    url = f"{index.rstrip('/')}/{project}/" + ("index.html" if index.startswith("file:") else "")
    with opened(url, accept=ACCEPT, cafile=cafile) as answer:
        page, base = read_page(answer, shown(url)).decode(), urljoin(url, answer.geturl())
        kind = answer.headers.get_content_type()
    if kind == JSON:
        try:
            links = [(file["url"], file.get("hashes", {}).get("sha256")) for file in json.loads(page)["files"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{shown(url)}: not a page of a package index") from error
    else:
        anchors = _Anchors()
        try:
            anchors.feed(page)
        except AssertionError as error:  # in this way Python's parser refuses some of what is no HTML
            raise DataError(f"{shown(url)}: not a page of a package index") from error
        base = urljoin(base, anchors.base)
        links = [_split_hash(link) for link in anchors.links]
    absolute = [(_with_credentials(urljoin(base, link), index), sha256) for link, sha256 in links]
    return {urlsplit(link).path.rpartition("/")[2]: (link, sha256) for link, sha256 in absolute}


def _split_hash(link: str) -> tuple[str, str | None]:
    address, fragment = urldefrag(link)
    return address, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None


def _with_credentials(link: str, index: str) -> str:
    """`link` with the user name and password of `index`, if it is on the same server."""
    parts, credentials = urlsplit(link), urlsplit(index).netloc.rpartition("@")
    same = (parts.scheme, parts.netloc) == (urlsplit(index).scheme, credentials[2])
    return urlunsplit(parts._replace(netloc="".join(credentials))) if same else link


class _Anchors(HTMLParser):
    """The links of a page, and the address they are relative to if it states one."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if target and tag == "a":
            self.links.append(target)
        elif target and tag == "base":
            self.base = target
