"""Fetching files whole and checked, and the folder they are kept in."""

import hashlib
import http.client
import os
import ssl
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from ..errors import DataError
from ..store import written_whole

TIMEOUT = 30.0  # seconds of silence, not of the whole transfer
BLOCK = 1 << 20  # bytes
LARGEST_PAGE = 1 << 20  # bytes of an index; that of the package has 1 % of it


def cache_folder() -> Path:
    """Where this platform keeps what can be fetched again; not created by asking."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = given if os.path.isabs(given) else "~/.cache"  # the convention: a relative one is to be ignored
    return Path(base).expanduser() / "streamnorm"


def keep(path: Path, *parts: bytes | bytearray) -> None:
    """Write `path` for the next time; without the room or the right to, there is no next time, and no harm."""
    with suppress(OSError), written_whole(path) as file:
        for part in parts:
            file.write(part)


def fetch(url: str, path: Path, sha256: str, largest: int, cafile: str | None = None) -> None:
    """Write what is at `url` to `path` if it is what `sha256` says, in `largest` bytes; otherwise leave no trace."""
    found = hashlib.sha256()
    with opened(url, cafile=cafile) as answer, written_whole(path) as file:
        for block in _blocks(answer, shown(url), path.name, largest):
            found.update(block)
            file.write(block)
        if found.hexdigest() != sha256:
            raise DataError(f"{shown(url)}: sha256 is {found.hexdigest()}, must be {sha256}: not the file wanted")


def read_page(answer: http.client.HTTPResponse, address: str) -> bytes:
    """A page that a person could look at, not one that fills the memory."""
    page = answer.read(LARGEST_PAGE + 1)
    if len(page) > LARGEST_PAGE:
        raise DataError(f"{address}: the page has more than {LARGEST_PAGE:,} bytes")
    return page


def _blocks(answer: http.client.HTTPResponse, address: str, name: str, largest: int) -> Iterator[bytes]:
    length = answer.headers.get("Content-Length", "")
    total = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None
    if (total or 0) > largest:
        raise DataError(f"{address}: {total:,} bytes, must be {largest:,} or less: not the file wanted")
    done, on_terminal = 0, sys.stderr.isatty()
    try:
        while block := answer.read(BLOCK):
            done += len(block)
            if done > largest:
                raise DataError(f"{address}: more than {largest:,} bytes: not the file wanted")
            yield block
            if on_terminal:
                of = f" of {total / 1e6:.1f}" if total else ""
                print(f"\r{name}: {done / 1e6:.1f}{of} MB", end="", file=sys.stderr, flush=True)
    finally:
        if on_terminal and done:
            print(file=sys.stderr)
    if total is not None and done < total:
        raise DataError(f"{address}: the connection ended after {done:,} of {total:,} bytes")


@contextmanager
def opened(url: str, accept: str = "*/*", cafile: str | None = None) -> Iterator[http.client.HTTPResponse]:
    """The answer of a server. Whatever the network does while it is read becomes a DataError without credentials."""
    address, authorization = _without_credentials(url)
    try:
        request = urllib.request.Request(address, headers={"Accept": accept, "User-Agent": "streamnorm"})
        if authorization:
            request.add_unredirected_header("Authorization", authorization)  # for this host and no other
        context = ssl.create_default_context(cafile=cafile) if cafile else None
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:
            yield answer
    except TimeoutError as error:
        raise DataError(f"{shown(url)}: no answer for {TIMEOUT:g} seconds") from error
    except urllib.error.HTTPError as error:
        error.close()
        meaning = http.client.responses.get(error.code, "")  # the server's own words can be many lines
        raise DataError(f"{shown(url)}: the server answered {error.code} {meaning}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{shown(url)}: {error.reason}") from error
    except (http.client.HTTPException, ConnectionError, ssl.SSLError, ValueError) as error:
        raise DataError(f"{shown(url)}: {error or type(error).__name__}") from error


def shown(url: str) -> str:
    """`url` as it may be printed: no user name, no password, no query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _without_credentials(url: str) -> tuple[str, str | None]:
    """`url` as urllib takes it, and the header that stands for the user name and password in it."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    address = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
    if not credentials:
        return address, None
    user, _, password = credentials.partition(":")
    return address, "Basic " + b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
